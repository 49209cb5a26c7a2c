"""Memory limits, and a check that a model fits into memory."""
