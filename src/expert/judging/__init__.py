"""What an answer must be: cases, oracles for each domain, and the score over many of them."""
