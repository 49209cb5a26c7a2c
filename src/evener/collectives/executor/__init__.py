"""Carries out a schedule with messages between ranks."""
