"""Inputs of a run (settings, tasks, losses) and its outputs (records, observers). Independent of processes and
devices."""
