"""How this interpreter was started, and how it ends: ``subprocess._args_from_interpreter_flags``,
``threading._shutdown`` and ``atexit._run_exitfuncs``, which are Python's.

``multiprocessing`` starts its processes with the first; ``sys.flags`` and ``sys.warnoptions`` would have to be put
into words by hand. The other two are what Python itself does at its end, before it destroys objects, and can be had
in no other way by a process that ends with ``os._exit``.

Tested with Python 3.11.
"""

from __future__ import annotations

import atexit
import subprocess
import threading


def flags() -> list[str]:
    """Returns the options of the interpreter, as a command line has them: ``-X dev -W error``."""
    found: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return found


def join_threads() -> None:
    """Waits for all threads that are no daemons."""
    threading._shutdown()  # type: ignore[attr-defined]


def run_exit_functions() -> None:
    """Calls what was registered with ``atexit``."""
    atexit._run_exitfuncs()
