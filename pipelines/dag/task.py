"""What happens inside a node's Ray task: it calls the function, keeps a log, and seals the outputs with _SUCCESS.json.

It also decides which failures are faults of the infrastructure, after which a node is retried.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import posixpath
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.files import Store, UserError, is_transient, naming_full_disk, open_store, printable
from pipelines.dag import attempts, fingerprint
from pipelines.dag.attempts import Success
from pipelines.dag.masking import Masked, mask
from pipelines.dag.node import NodeContext, NodeResult, Picture

# Kinds of Ray's and Ray Train's own errors: a process, a machine or what Ray kept there is gone. Not with those that
# carry an error of the code (as a bare RayError does if that cannot be pickled) or say that a disk is full.
_OF_RAY = {"RayError", "RayTrainError"}
_NOTHING_IS_GONE = {"RayTaskError", "UserCodeException", "UserExceptionWithTraceback", "OutOfDiskError"}
# When one training worker ends, for whatever reason, the others fail in the middle of communicating with it.
_PEER_GONE = re.compile(r"gloo/transport|connection (closed|reset) by peer|nccl|broken pipe", re.IGNORECASE)


@dataclass(frozen=True)
class Outcome:
    """What the driver gets back: a success, or else an error."""

    success: Success | None
    error: str = ""  # one line
    is_fault: bool = False  # of the infrastructure: the node may be retried
    is_user_error: bool = False  # the user's data or configuration is wrong, not the program
    pictures: Sequence[Picture] = ()


def execute(
    function: str, context: NodeContext[Any], ingredients: Mapping[str, Any], git_commit: str, *after: None
) -> Outcome:
    """Runs a node to its _SUCCESS.json, or leaves error.txt. Raises only when cancelled, or when storage is down."""
    out, started = open_store(context.out), attempts.utc_now()
    if (local := out.local()) is not None:
        local.mkdir(parents=True, exist_ok=True)
    out.delete(attempts.ERROR)
    with naming_full_disk(context.out), kept_log(out):
        try:
            if context.restarts:
                with context.run.open() as run:
                    run.set_tags({"restarts": str(context.restarts)})
            module, _, name = function.partition(":")
            call = getattr(importlib.import_module(module), name)
            root = Path(sys.modules[module.partition(".")[0]].__file__ or "").resolve().parents[1]  # on this machine
            if changed := fingerprint.changed(ingredients.get("code", {}), root):
                raise UserError(f"the code changed since this launch ({', '.join(changed)}); start again")
            with naming_full_disk(context.out):
                result = call(context)
            assert isinstance(result, NodeResult), f"{function} returned {type(result).__name__}, not a NodeResult"
            outputs = attempts.measure(out, result.outputs, result.sha256)
        except Exception as error:
            text = traceback.format_exc()
            print(text, file=sys.stderr)
            return failed(out, error, text)
    success = Success(
        node=context.node,
        fingerprint=context.fingerprint,
        attempt=context.attempt,
        started=started,
        finished=attempts.utc_now(),
        outputs=outputs,
        named=dict(result.outputs),
        upstream={need: output.attempt for need, output in context.inputs.items()},
        ingredients=dict(ingredients),
        metrics={key: float(value) for key, value in result.metrics.items()},
        mlflow_run_id=context.run.run_id,
        git_commit=git_commit,
    )
    out.write_bytes(attempts.SUCCESS, success.to_bytes())
    return Outcome(success, pictures=result.pictures)


def failed(out: Store, error: BaseException, text: str) -> Outcome:
    """Writes error.txt and says what kind of failure it was."""
    with contextlib.suppress(OSError):  # storage itself may be down, or full
        out.write_text(attempts.ERROR, mask(text))
    is_user_error = isinstance(root_cause(error), UserError)
    return Outcome(None, one_line(error), is_infrastructure_fault(error), is_user_error)


def adopt(store: Store, kept: Success, *, fingerprint: str, ingredients: Mapping[str, Any], why: str) -> Success:
    """Writes a _SUCCESS.json that makes an older output the current one; the output keeps its id and its place."""
    made_by = kept.adopted["fingerprint"] if kept.adopted else kept.fingerprint
    adopted = {"fingerprint": made_by, "when": attempts.utc_now(), "in_spite_of": why}
    record = dataclasses.replace(kept, fingerprint=fingerprint, ingredients=dict(ingredients), adopted=adopted)
    folder = attempts.attempt_folder(kept.node, fingerprint, kept.attempt)
    store.write_bytes(posixpath.join(folder, attempts.SUCCESS), record.to_bytes())
    return record


@contextlib.contextmanager
def kept_log(out: Store) -> Iterator[None]:
    """Copies prints and log records of this process to a file in the attempt, after what an earlier try left there."""
    local = out.local(attempts.LOG)
    with contextlib.ExitStack() as stack:
        if local is None:
            local = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "log.txt"
            if out.exists(attempts.LOG):
                out.download(attempts.LOG, local)
            stack.callback(out.upload, local, attempts.LOG)
        kept = stack.enter_context(local.open("a", encoding="utf-8", errors="replace", buffering=1))
        stack.enter_context(contextlib.redirect_stdout(Masked(sys.stdout, copy=kept)))
        stack.enter_context(contextlib.redirect_stderr(Masked(sys.stderr, copy=kept)))
        handler = logging.StreamHandler(Masked(kept))
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root, level = logging.getLogger(), logging.getLogger().level
        root.addHandler(handler)
        root.setLevel(min(level, logging.INFO))
        stack.callback(root.setLevel, level)
        stack.callback(root.removeHandler, handler)
        print(f"--- {attempts.utc_now()} start", file=kept)
        yield


def is_infrastructure_fault(error: BaseException) -> bool:
    """Whether a node may succeed if it is simply started again.

    Ray's and Ray Train's wrappers are opened; a Python exception that the node's code made of another one counts as it
    stands. When several workers failed, one fault of the infrastructure is enough: the other failures follow from it.
    A lost connection to another worker says only that that worker ended, so it counts as a fault of the infrastructure
    if no worker has an error of its own.
    """
    parts = list(_parts(error))
    if any("UserCodeException" in _kinds(part) for part in parts):  # Ray Data's: only the text of its cause travels
        parts.append(OSError(str(error)))
    return any(_is_fault(part) for part in parts) or all(_has_lost_peer(part) for part in parts)


def root_cause(error: BaseException) -> BaseException:
    """The error to show to people: the first that Ray wrapped; faults of the infrastructure come before other errors,
    and other errors before a lost connection to another worker."""
    parts = list(_parts(error))
    own = (part for part in parts if not _has_lost_peer(part))
    return next((part for part in parts if _is_fault(part)), next(own, parts[0]))


def one_line(error: BaseException) -> str:
    """The error as the progress lines and the summary show it, without secrets; a UserError speaks for itself."""
    error = root_cause(error)
    message = printable(mask(next((line.strip() for line in str(error).splitlines() if line.strip()), "")))
    if isinstance(error, UserError):
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _parts(error: BaseException) -> Iterator[BaseException]:
    """What Ray wrapped, at any depth, or else the error itself."""
    inner = [getattr(error, name, None) for name in ("controller_failure", "health_check_failure")]
    if hasattr(error, "as_instanceof_cause"):  # RayTaskError
        inner.append(getattr(error, "cause", None))
    inner += (getattr(error, "worker_failures", None) or {}).values()
    if "UserCodeException" in _kinds(error):
        inner.append(error.__cause__)
    wrapped = [part for part in inner if isinstance(part, BaseException) and part is not error]
    if not wrapped:
        yield error
    for part in wrapped:
        yield from _parts(part)


def _is_fault(error: BaseException) -> bool:
    kinds = _kinds(error)
    is_gone = bool(kinds & _OF_RAY) and type(error).__name__ not in _OF_RAY and not kinds & _NOTHING_IS_GONE
    return is_gone or is_transient(error)


def _has_lost_peer(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and _PEER_GONE.search(str(error)) is not None


def _kinds(error: BaseException) -> set[str]:
    """Names of its class and its bases, of those that are Ray's: Ray need not be imported to look at an error."""
    return {kind.__name__ for kind in type(error).__mro__ if kind.__module__.partition(".")[0] == "ray"}
