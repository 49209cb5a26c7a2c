"""Observes a script of the user's own that trains with DDP."""
