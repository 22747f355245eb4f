"""Sequences to batches on the device, in the order of the run."""
