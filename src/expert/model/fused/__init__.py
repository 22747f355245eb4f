"""Decoder blocks with LoRA as a few functions, whose kernels read and write memory once."""
