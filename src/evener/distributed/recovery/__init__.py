"""Rank replacement: replaces a rank that died while the others stay."""
