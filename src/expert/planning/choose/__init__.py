"""One file for each kind of choice: batches, kernels, lengths, time."""
