"""What is done with a task beside training: verify, estimate, bench, and tests of parts of your own."""
