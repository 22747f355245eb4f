"""What a run was and why: read from its folder alone, without torch."""
