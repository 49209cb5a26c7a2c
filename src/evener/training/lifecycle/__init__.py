"""Lifecycle of a run: saving, early stopping, falling back to a checkpoint, and replacing a rank."""
