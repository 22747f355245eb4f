"""Models by name and shape, and where their files are."""
