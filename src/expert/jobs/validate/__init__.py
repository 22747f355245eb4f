"""expert validate: answers to held-out rows, judged."""
