"""Talks to a person: one file for each command, what it takes and how it shows it."""
