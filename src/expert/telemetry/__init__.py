"""Times, rates, GPU and CPU counters, trackers such as TensorBoard."""
