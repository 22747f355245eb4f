"""LoRA and DoRA added inside the matrix product, on plain and NF4 weights."""
