"""Watches that ranks make progress, and tells who does not."""
