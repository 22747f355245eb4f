"""Timings, throughput, GPU and CPU counters, trackers such as TensorBoard."""
