"""What several devices of one process need: copies, threads, and what crosses borders."""
