"""Options and shutdown of the Python interpreter: ``subprocess._args_from_interpreter_flags``,
``threading._shutdown`` and ``atexit._run_exitfuncs``.

``multiprocessing`` starts its processes with the first; the public ``sys.flags`` and ``sys.warnoptions`` would have to
be converted to options by hand. Python calls the other two at its end, before it destroys objects. A process that ends
with ``os._exit`` has no public way to call them.

Tested with Python 3.11.
"""

from __future__ import annotations

import atexit
import subprocess
import threading


def flags() -> list[str]:
    """Returns the options of this interpreter as command-line arguments, such as ``-X dev -W error``."""
    found: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return found


def join_threads() -> None:
    """Waits for all threads that are not daemons."""
    threading._shutdown()  # type: ignore[attr-defined]


def run_exit_functions() -> None:
    """Calls the functions that were registered with ``atexit``."""
    atexit._run_exitfuncs()
