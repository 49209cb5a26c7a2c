"""Sums whose bits depend neither on the order of the terms nor on how they are grouped."""
