"""A running session: start, steps, recovery, evaluation, end."""
