"""Reads YAML and JSON with line numbers."""
