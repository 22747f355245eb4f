"""Every key with its default, its values and one line of meaning."""
