"""Which failures are the infrastructure's: a node that met one starts again, a node whose own code failed does not."""

from __future__ import annotations

import re
from collections.abc import Iterator

from data_prep.files import is_transient

_LOST = (  # of ray.exceptions: a process, a machine or what Ray kept there is gone
    "WorkerCrashedError",
    "NodeDiedError",
    "OutOfMemoryError",
    "RayActorError",
    "ObjectLostError",
    "LocalRayletDiedError",
    "RaySystemError",
    "RpcError",
    "TaskPlacementGroupRemoved",
    "ActorPlacementGroupRemoved",
    "WorkerHealthCheckTimeoutError",  # from here on of Ray Train
    "WorkerGroupStartupFailedError",
    "WorkerGroupStartupTimeoutError",
    "PreemptionError",
)
# When one training worker ends, of whatever cause, the others fail in the middle of talking to it.
_PEER_GONE = re.compile(r"gloo/transport|connection (closed|reset) by peer|nccl|broken pipe", re.IGNORECASE)


def is_infrastructure(error: BaseException) -> bool:
    """Whether a node may succeed if it is simply started again.

    Ray's and Ray Train's wrappers are opened; a Python exception that the node's code made of another one is the
    code's own judgement and counts as it stands. Of several workers' failures one of the infrastructure is enough:
    the others follow from it. A connection to another worker that broke says only that this one ended, so it is the
    infrastructure's where no worker has an error of its own.
    """
    parts = list(_parts(error))
    if any("UserCodeException" in _kinds(part) for part in parts):  # Ray Data's: of its cause only the text travels
        parts.append(OSError(str(error)))
    return any(_is_lost(part) for part in parts) or all(_has_lost_peer(part) for part in parts)


def root_cause(error: BaseException) -> BaseException:
    """What to tell people of an error: the first that Ray wrapped in it, one of the infrastructure before others, and
    any before a lost connection to another worker."""
    parts = list(_parts(error))
    own = (part for part in parts if not _has_lost_peer(part))
    return next((part for part in parts if _is_lost(part)), next(own, parts[0]))


def _parts(error: BaseException) -> Iterator[BaseException]:
    """What Ray wrapped, at whatever depth, or else the error itself."""
    inner = [getattr(error, name, None) for name in ("controller_failure", "health_check_failure")]
    if hasattr(error, "as_instanceof_cause"):  # RayTaskError
        inner.append(getattr(error, "cause", None))
    inner += (getattr(error, "worker_failures", None) or {}).values()
    if "UserCodeException" in _kinds(error):
        inner.append(error.__cause__)
    inner = [part for part in inner if isinstance(part, BaseException) and part is not error]
    if not inner:
        yield error
    for part in inner:
        yield from _parts(part)


def _is_lost(error: BaseException) -> bool:
    return not _kinds(error).isdisjoint(_LOST) or is_transient(error)


def _has_lost_peer(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and _PEER_GONE.search(str(error)) is not None


def _kinds(error: BaseException) -> set[str]:
    """Names of its class and their bases: Ray need not be imported to look at an error."""
    return {kind.__name__ for kind in type(error).__mro__}
