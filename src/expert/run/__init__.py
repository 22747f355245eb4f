"""What several commands share: opens a manifest once, builds the model."""
