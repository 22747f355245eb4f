"""YAML and JSON text with line numbers and comments."""
