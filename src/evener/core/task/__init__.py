"""Tasks: definition and validation."""
