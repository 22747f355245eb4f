"""expert export: adapter or merged weights, checked, with a model card."""
