"""Looks at rows as training would, without writing."""
