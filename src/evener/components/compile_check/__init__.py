"""Compares compiled code with the code that it was made of."""
