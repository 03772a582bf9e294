"""What happens inside a node's Ray task: call its function, keep its log, seal its outputs with _SUCCESS.json."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import posixpath
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from data_prep.files import Store, UserError
from pipelines import tracking
from pipelines.dag import attempts
from pipelines.dag.attempts import Success
from pipelines.dag.faults import is_infrastructure, root_cause
from pipelines.dag.masking import Masked, mask
from pipelines.dag.node import NodeContext, NodeOutput, NodeResult

if TYPE_CHECKING:
    from pipelines.dag.plan import Decision
    from pipelines.dag.progress import Reporter
    from pipelines.tracking import RunHandle


@dataclass(frozen=True)
class Task:
    """Everything the worker needs. Picklable."""

    store: Store
    function: str
    context: NodeContext
    upstream: Mapping[str, str]
    ingredients: Mapping[str, Any]
    git_commit: str

    @property
    def folder(self) -> str:
        return attempts.attempt_folder(self.context.node, self.context.fingerprint, self.context.attempt)


def make_task(
    decision: Decision,
    *,
    attempt: str,
    store: Store,
    outputs: Mapping[str, NodeOutput],
    run: RunHandle,
    progress: Reporter,
    git_commit: str,
    restarts: int = 0,
) -> Task:
    """The task of a node that is to run. outputs: of all nodes so far; restarts: earlier starts of this attempt."""
    node = decision.node
    assert decision.fingerprint is not None and decision.ingredients is not None
    context = NodeContext(
        node=node.name,
        fingerprint=decision.fingerprint,
        attempt=attempt,
        config=node.config,
        options=node.options,
        inputs={need: outputs[need] for need in node.needs},
        out=store.uri_of(attempts.attempt_folder(node.name, decision.fingerprint, attempt)),
        run=run,
        progress=progress,
        fresh=decision.attempt is None,
        restarts=restarts,
    )
    upstream = {need: outputs[need].attempt for need in node.needs}
    return Task(store, node.function, context, upstream, decision.ingredients, git_commit)


@dataclass(frozen=True)
class Outcome:
    """What the driver gets back: exactly one of the two."""

    success: Success | None
    error: str = ""  # one line
    lost: bool = False  # to a fault of the infrastructure: it may be tried again
    mistaken: bool = False  # a UserError: the user's data or configuration, not the program


def execute(task: Task) -> Outcome:
    """Runs a node to its _SUCCESS.json, or leaves error.txt. Raises only when cancelled, or when storage is away."""
    store, started = task.store, attempts.utc_now()
    local = store.local(task.folder)
    if local is not None:
        local.mkdir(parents=True, exist_ok=True)
    store.delete(posixpath.join(task.folder, attempts.ERROR))
    with kept_log(store, posixpath.join(task.folder, attempts.LOG)):
        try:
            if task.context.restarts:
                with task.context.run.open() as run:
                    run.set_tags({"restarts": str(task.context.restarts)})
            result = _function(task.function)(task.context)
            assert isinstance(result, NodeResult), f"{task.function} returned {type(result).__name__}, not a NodeResult"
            outputs = attempts.measure(store, task.folder, result.outputs, result.sha256)
        except Exception as error:
            text = traceback.format_exc()
            print(text, file=sys.stderr)
            return _failed(task, error, text)
        finally:
            tracking.flush_open_runs()
    success = Success(
        node=task.context.node,
        fingerprint=task.context.fingerprint,
        attempt=task.context.attempt,
        started=started,
        finished=attempts.utc_now(),
        outputs=outputs,
        named=dict(result.outputs),
        upstream=dict(task.upstream),
        ingredients=dict(task.ingredients),
        metrics={key: float(value) for key, value in result.metrics.items()},
        mlflow_run_id=task.context.run.known().run_id,
        git_commit=task.git_commit,
    )
    store.write_bytes(posixpath.join(task.folder, attempts.SUCCESS), success.to_bytes())
    return Outcome(success)


def adopt(store: Store, kept: Success, *, fingerprint: str, ingredients: Mapping[str, Any], why: str) -> Success:
    """Writes a _SUCCESS.json that makes an older output the current one; the output keeps its id and its place."""
    made_by = kept.adopted["fingerprint"] if kept.adopted else kept.fingerprint
    adopted = {"fingerprint": made_by, "when": attempts.utc_now(), "in_spite_of": why}
    record = dataclasses.replace(
        kept,
        fingerprint=fingerprint,
        ingredients=dict(ingredients),
        upstream=dict(ingredients["upstream"]),
        adopted=adopted,
    )
    folder = attempts.attempt_folder(kept.node, fingerprint, kept.attempt)
    store.write_bytes(posixpath.join(folder, attempts.SUCCESS), record.to_bytes())
    return record


@contextlib.contextmanager
def kept_log(store: Store, file: str) -> Iterator[None]:
    """Copies prints and log records of this process to a file in the attempt, after what an earlier try left there."""
    local = store.local(file)
    with contextlib.ExitStack() as stack:
        if local is None:
            local = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "log.txt"
            if store.exists(file):
                store.download(file, local)
            stack.callback(lambda: store.upload(local, file))
        stream = Masked(stack.enter_context(local.open("a", encoding="utf-8", errors="replace", buffering=1)))
        stack.enter_context(contextlib.redirect_stdout(_Tee(stream, sys.stdout)))
        stack.enter_context(contextlib.redirect_stderr(_Tee(stream, sys.stderr)))
        handler = logging.StreamHandler(stream)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root, level = logging.getLogger(), logging.getLogger().level
        root.addHandler(handler)
        root.setLevel(min(level, logging.INFO))
        stack.callback(root.setLevel, level)
        stack.callback(root.removeHandler, handler)
        print(f"--- {attempts.utc_now()} start", file=stream)
        yield


class _Tee:
    """Writes to a file and to what was there before; everything else is the old stream's."""

    def __init__(self, file: IO[str], stream: IO[str]) -> None:
        self._file, self._stream = file, stream

    def write(self, text: str) -> int:
        if not self._file.closed:  # a thread may print after its node has ended
            self._file.write(text)
        self._stream.write(mask(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _function(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _failed(task: Task, error: BaseException, text: str) -> Outcome:
    lost = is_infrastructure(error)
    with contextlib.suppress(OSError) if lost else contextlib.nullcontext():  # it may be storage that is away
        task.store.write_text(posixpath.join(task.folder, attempts.ERROR), mask(text))
    return Outcome(None, one_line(error), lost, mistaken=isinstance(root_cause(error), UserError))


def one_line(error: BaseException) -> str:
    """The error as the plan's lines and the summary show it; a UserError speaks for itself. Without secrets."""
    error = root_cause(error)
    message = mask(next((line.strip() for line in str(error).splitlines() if line.strip()), ""))
    if isinstance(error, UserError):
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
