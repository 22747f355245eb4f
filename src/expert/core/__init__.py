"""Errors, events, files, run folders, child processes, text. Standard library only."""
