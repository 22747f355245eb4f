"""expert board: the report of every run of some folders, live in a browser."""
