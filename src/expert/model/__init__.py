"""Loads models, adds adapters, sets attention, loss and compilation."""
