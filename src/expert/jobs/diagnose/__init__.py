"""expert diagnose: machine, data and plan before a run; a run after it."""
