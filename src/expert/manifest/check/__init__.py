"""Schema problems, rules across keys, and spelling suggestions."""
