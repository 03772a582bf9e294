"""Ctrl-C while a command's modules are imported: the same line and exit code as later on, no traceback.

Importing takes a second or two. A KeyboardInterrupt would then be nobody's to catch, or would be caught by a package
that only tries whether another one can be imported. Nothing is under way yet, so the process simply ends. This file
imports next to nothing itself.
"""

from __future__ import annotations

import os
import signal

INTERRUPTED = 130  # what shells make of SIGINT
LINE = "interrupted; the same command goes on from here"


def ends_the_process() -> None:
    """From now on, until `raises_again`. A command that was started to ignore Ctrl-C still does."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raises_again() -> None:
    """KeyboardInterrupt as usual, for code that has something to tidy up."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*_: object) -> None:
    os.write(2, f"{LINE}\n".encode())
    os._exit(INTERRUPTED)
