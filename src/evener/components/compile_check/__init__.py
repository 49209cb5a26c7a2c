"""Compiled code beside the code that it was made of: what is computed by both, and whether it is the same."""
