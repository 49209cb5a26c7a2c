"""``python -m evener`` is the command ``evener``."""

from __future__ import annotations

import sys

from evener.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
