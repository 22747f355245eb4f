"""What a run was and why: read from its folder alone, on any machine, without torch."""
