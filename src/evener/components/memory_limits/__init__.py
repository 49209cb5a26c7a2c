"""Limits of memory, and whether a model fits."""
