"""Replaces a rank that died while the others stay."""
