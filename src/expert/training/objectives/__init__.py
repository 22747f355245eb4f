"""What a run learns from, one file for each kind."""
