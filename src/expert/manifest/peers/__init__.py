"""Converts config files of other trainers."""
