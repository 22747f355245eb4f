"""Explains a run from its folder, without torch: diagnosis, report, benchmark tables."""
