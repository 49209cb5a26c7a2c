"""How state is kept in parts: PyTorch's FSDP2 in units, and rows with owners."""
