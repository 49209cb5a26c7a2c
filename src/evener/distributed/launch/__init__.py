"""Starts ranks, watches over them, and ends them."""
