"""Reads, checks, converts and explains config files of every layout."""
