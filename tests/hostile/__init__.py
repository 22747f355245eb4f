"""Folders and files that somebody made to hang, exhaust or take over what reads them."""
