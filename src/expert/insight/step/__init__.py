"""Where the time of a step goes, and how that compares with other runs."""
