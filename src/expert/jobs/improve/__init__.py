"""expert improve: an expert learns from its own answers, as its judge sees them."""
