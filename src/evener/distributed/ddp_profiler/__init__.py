"""Profiles a user's script that trains with DDP."""
