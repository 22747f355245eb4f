"""expert board: every run of some folders as live pages in a browser."""
