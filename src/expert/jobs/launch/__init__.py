"""Many GPUs: ranks of one run, one run for each card, and files that start ranks on clusters."""
