"""Rows to batches: read, examples, segments, tokens, index, batches."""
