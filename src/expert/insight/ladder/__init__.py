"""The before/after table of a benchmark."""
