"""The pages of the board, one file for each kind."""
