"""The state of a run in its checkpoints."""
