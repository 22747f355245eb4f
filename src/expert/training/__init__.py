"""The training loop: step, optimizer, schedule, checkpoints, recovery."""
