"""Reads and writes YAML and JSON with line numbers and comments."""
