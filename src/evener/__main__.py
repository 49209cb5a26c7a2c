"""``python -m evener`` is the command ``evener``."""

from __future__ import annotations

from evener.cli.main import command

if __name__ == "__main__":
    command()
