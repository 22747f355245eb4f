"""expert benchmark: what each setting is worth on this machine."""
