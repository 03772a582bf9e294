"""Node functions that tests of the engine run, in this process or as Ray tasks."""

from __future__ import annotations

import errno
import logging
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from data_prep.files import UserError
from pipelines.dag.node import NodeContext, NodeResult


@dataclass(frozen=True)
class Toy:
    """Config of a toy node; only `value` decides its result."""

    value: str = ""
    place: str = field(default="", metadata={"semantic": False})
    other: str = field(default="", metadata={"semantic": False})
    broken: str = field(default="", metadata={"semantic": False})
    times: int = field(default=0, metadata={"semantic": False})
    errno: int = field(default=errno.EIO, metadata={"semantic": False})


def write(context: NodeContext) -> NodeResult:
    """Writes its value and what it read upstream."""
    seen = [Path(output.uri, output.named["value"]).read_text() for output in context.inputs.values()]
    Path(context.out, "value.txt").write_text(f"{getattr(context.config, 'value', '')}({','.join(seen)})")
    print("a printed line of", context.node)
    logging.getLogger("toy").info("a logged line of %s", context.node)
    with context.run.open() as run:
        run.log_metrics({"value": 1.0}, step=3)
    context.progress.update(1, 1, unit="values")
    return NodeResult({"value": "value.txt"}, {"value": 2.0, "length": float(len(seen))})


def stamp(context: NodeContext) -> NodeResult:
    """Like write, but no two attempts make equal files."""
    result = write(context)
    with Path(context.out, "value.txt").open("a") as file:
        file.write(context.attempt)
    return result


def curve(context: NodeContext) -> NodeResult:
    """A value that every attempt makes alike, and beside it a file that none does."""
    result = write(context)
    Path(context.out, "curve.txt").write_text(context.attempt)
    return NodeResult({**result.outputs, "curve": "curve.txt"})


def fail_while(context: NodeContext) -> NodeResult:
    """Fails as long as the file config.broken exists."""
    if Path(context.config.broken).exists():
        raise RuntimeError("broken on purpose\nwith a second line")
    return write(context)


def mistake(context: NodeContext) -> NodeResult:
    raise UserError("the folder is empty")


def pid(context: NodeContext) -> NodeResult:
    write(context)
    return NodeResult({"value": "value.txt"}, {"pid": float(os.getpid())})


def die(context: NodeContext) -> NodeResult:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def storage_fails(context: NodeContext) -> NodeResult:
    """Storage fails config.times times, then all is well; other errors of storage with config.errno."""
    tries = Path(context.config.place, "tries")
    done = len(tries.read_text()) if tries.exists() else 0
    tries.write_text("x" * (done + 1))
    if done < context.config.times:
        raise OSError(context.config.errno, "storage failed")
    return write(context)


def die_once(context: NodeContext) -> NodeResult:
    """Like count, but its process is killed in the middle of the first try."""
    for step in range(3):
        Path(context.out, f"step{step}.txt").touch(exist_ok=True)
        if step == 1 and context.restarts == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return NodeResult({"steps": "."}, {"restarts": float(context.restarts)})


def count(context: NodeContext) -> NodeResult:
    """Three steps, one file each; stops in the middle as long as config.broken exists. Resumes where it stopped."""
    with context.run.open() as run:
        for step in range(3):
            file = Path(context.out, f"step{step}.txt")
            if not file.exists():
                file.write_text(str(context.restarts == 0))
                run.log_metrics({"curve": float(step)}, step=step)
            if step == 1 and Path(context.config.broken).exists():
                raise RuntimeError("stopped in the middle")
    return NodeResult({"steps": "."})


def meet(context: NodeContext) -> NodeResult:
    """Ends only when the other one runs too: both write a file and wait for the other's."""
    place = Path(context.config.place)
    (place / context.node).touch()
    deadline = time.monotonic() + 120
    while not (place / context.config.other).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{context.config.other} never ran beside me")
        time.sleep(0.02)
    return write(context)


def wait_for_ever(context: NodeContext) -> NodeResult:
    Path(context.config.place, "pid").write_text(str(os.getpid()))
    deadline = time.monotonic() + 120  # for ever, as far as a test goes: a test that fails must end
    while time.monotonic() < deadline:
        time.sleep(0.05)
    raise RuntimeError("nobody stopped this node")
