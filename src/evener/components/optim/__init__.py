"""Optimizers with fused updates or with state in 8 bits."""
