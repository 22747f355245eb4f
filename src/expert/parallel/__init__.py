"""Engines for one GPU or many, process groups, CUDA graphs."""
