"""Settings of a run."""
