"""expert new: a folder with a manifest, from rows or a starter."""
