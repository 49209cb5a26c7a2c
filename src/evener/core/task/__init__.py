"""What is trained, and whether it can be."""
