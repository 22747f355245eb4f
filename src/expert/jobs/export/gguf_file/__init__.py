"""Experts as GGUF files for llama.cpp and Ollama: tensors, vocabulary, quantised types, LoRA."""
