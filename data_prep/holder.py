"""Who holds a lock, told in the lock itself: this process, and whether the process of another lock still lives here."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import psutil


def describe() -> dict:
    """What tells this process from every other, and where it is, for JSON."""
    process = psutil.Process()
    return {
        "host": socket.gethostname(),
        "place": _place(),
        "pid": process.pid,
        "process_started": process.create_time(),
    }


def is_here(holder: Mapping) -> bool:
    """Whether its pid is one of those that this process sees."""
    return holder.get("place") == _place()


def is_alive(holder: Mapping) -> bool:
    """Of a holder that is here. One that says too little of itself is taken for dead."""
    try:
        process = psutil.Process(holder["pid"])
        same = abs(process.create_time() - holder["process_started"]) < 2.0  # the pid may be another process by now
        return same and process.status() != psutil.STATUS_ZOMBIE
    except (KeyError, ValueError, psutil.NoSuchProcess):
        return False
    except psutil.AccessDenied:
        return True


def _place() -> str:
    """Names the set of processes that a pid belongs to: containers may share a host name and not their pids."""
    try:
        return f"{socket.gethostname()}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()
