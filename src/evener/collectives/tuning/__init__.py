"""Measures or simulates the time of all-reduces, and selects one for each size."""
