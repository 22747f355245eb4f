"""Times, rates, GPU and CPU counters, TensorBoard files."""
