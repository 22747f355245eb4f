"""The engine that the loop drives, the world it runs in, CUDA graphs."""
