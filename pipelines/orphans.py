"""Ends what a killed driver leaves of its own Ray session.

Ray's servers and workers end with the driver, but its two agents then try for a minute to tell the control store, which
is gone too. A small process beside the driver notices its end by a pipe and ends them. A driver that disconnects in
order leaves it nothing to do.

    python pipelines/orphans.py PID_OF_RAYLET     (reads standard input to its end, then acts)
"""

from __future__ import annotations

import contextlib
import select
import subprocess
import sys
import time

import psutil

_NUM_AGENTS = 2  # DashboardAgent and RuntimeEnvAgent; a raylet that loses one ends
_RAYLET_SEC = 30.0  # how long the raylet has to notice that its driver is gone


def watch() -> subprocess.Popen | None:
    """Starts the process for this driver's session; None where the driver has no raylet. `dismiss` it at the end."""
    raylets = [child.pid for child in psutil.Process().children() if child.name() == "raylet"]
    if not raylets:
        return None
    # A session of its own: Ctrl-C goes to the driver's whole group.
    return subprocess.Popen(
        [sys.executable, __file__, str(raylets[0])],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def dismiss(watcher: subprocess.Popen | None) -> None:
    """After the session has ended."""
    if watcher is not None and watcher.stdin is not None:
        watcher.stdin.close()
        watcher.wait()


def main() -> None:
    try:
        raylet = psutil.Process(int(sys.argv[1]))
        agents = agents_of(raylet)
    except psutil.NoSuchProcess:  # ended before its agents were seen: they leave by themselves
        return
    deadline = time.monotonic() + _RAYLET_SEC
    while is_alive(raylet):
        if time.monotonic() > deadline:
            return  # it serves somebody: not ours to end
        time.sleep(0.1)
    for agent in agents:
        with contextlib.suppress(psutil.NoSuchProcess):
            agent.kill()


def is_alive(process: psutil.Process) -> bool:
    """A zombie is not: in a container there may be nobody to collect it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def agents_of(raylet: psutil.Process) -> list[psutil.Process]:
    """The raylet's agents, looked for while it lives: afterwards nothing tells whose they were. Waits for the driver's
    end."""
    while True:
        agents = [child for child in raylet.children() if child.name().endswith("Agent")]
        if select.select([sys.stdin], [], [], 1.0 if len(agents) < _NUM_AGENTS else None)[0]:
            return agents


if __name__ == "__main__":
    main()
