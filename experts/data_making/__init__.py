"""What the generators of the experts share: rows, splits that do not leak, files, a baseline."""
