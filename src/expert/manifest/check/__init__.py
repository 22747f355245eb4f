"""Rules that span keys, spelling suggestions, problems with their line."""
