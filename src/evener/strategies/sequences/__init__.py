"""Batches cut along their sequences, and the proof that a model may be given pieces."""
