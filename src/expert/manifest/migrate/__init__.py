"""Older layouts and other names for keys, moved to where they belong."""
