"""Mixed precision: which modules compute in which type, and the loss scale."""
