"""Tokens to sequences: the pack index."""
