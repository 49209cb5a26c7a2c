"""Watches that ranks make progress, and reports the ranks that do not."""
