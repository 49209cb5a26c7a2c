"""Executes all-reduce schedules by messages between ranks."""
