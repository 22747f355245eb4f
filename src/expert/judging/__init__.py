"""What an answer must be: cases, judges for each domain, the score and the gate."""
