"""All keys of a manifest with their types, defaults and help texts."""
