"""Knows how to learn: one loop, one step, optimizer, schedule, checkpoints, recovery."""
