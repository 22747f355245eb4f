"""Moves keys of older layouts and aliases to their place in the 2.0 layout; applies --set."""
