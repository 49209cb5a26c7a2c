"""Checks of what a model does to its parameters."""
