"""Columns and messages of a row to an example."""
