"""Rows to batches: read, format, tokenise, pack, load."""
