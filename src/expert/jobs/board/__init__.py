"""expert board: live reports of all runs in a browser."""
