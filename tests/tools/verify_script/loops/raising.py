"""A script that fails wherever it runs."""

raise ValueError("no such thing")
