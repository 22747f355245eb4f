"""Shared by several commands: opens a manifest once, builds the model."""
