"""Tools besides training: verify, estimate, bench, and conformance tests for user-defined parts."""
