"""The signals that ask a run to stop."""

from __future__ import annotations

import signal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)
"""SIGINT and SIGQUIT (Ctrl-C and Ctrl-\\), SIGTERM, SIGUSR1 (SLURM) and SIGHUP (a closing terminal)."""
