"""Problems of a run, before it starts and after it: evidence, threshold, fix."""
