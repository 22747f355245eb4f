"""Many GPUs: ranks of one run, one run for each GPU, and job files for clusters."""
