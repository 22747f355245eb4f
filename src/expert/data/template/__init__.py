"""Examples to text with marked answers, by the chat template of the model."""
