"""The commands: options, help and output, one file for each command."""
