"""Automatic mixed precision: what is computed in which type, and the scale of gradients."""
