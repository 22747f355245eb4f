"""Turns a manifest and a machine into a plan, with a reason for every value."""
