"""How much memory a step takes, and what fits."""
