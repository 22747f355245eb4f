"""Rows from files of any format, folders and the hub."""
