"""Runs on disk: find, resume, load, status."""
