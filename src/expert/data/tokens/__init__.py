"""Text to tokens on disk, once, keyed by content."""
