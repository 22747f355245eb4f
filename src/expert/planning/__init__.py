"""Decides: from a manifest and a machine to a plan with a reason for every value."""
