"""A run while it lasts: start, steps, recovery, evaluation, end."""
