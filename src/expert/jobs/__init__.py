"""One name for each command: what it does, without how it is shown."""
