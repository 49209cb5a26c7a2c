"""What a run is told (settings, tasks, losses) and what it tells (records, observers). No process and no device is
known here."""
