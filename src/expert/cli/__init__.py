"""The commands: options, help and output."""
