"""Workers of one node, each doing one chunk after the other: the node's own process, or several Ray actors that start
together or not at all."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def gang(worker: type, job: Any, *arguments: Any, most: int) -> Iterator[list[Any]]:
    """Workers of a class for a job: job.config.resources.num_workers, but at most `most`. They end with the block. With
    num_workers=1 it is an object of this process.

    Actors start together or not at all: two runs that hold half of the GPUs each would wait for each other. One that
    dies is replaced and its call made again, resources.max_failures times; then Ray's error is raised. A placement
    group that a killed start of the same job left behind in this Ray session is removed first.
    """
    resources, name = job.config.resources, gang_name(worker, job)
    num = min(resources.num_workers, most)
    if not num or resources.num_workers == 1:  # the node's own task has the CPUs and the GPU
        yield [worker(job, *arguments) for _ in range(num)]
        return
    import ray

    def remove_group() -> None:
        with contextlib.suppress(ValueError):  # there is none of this name
            ray.util.remove_placement_group(ray.util.get_placement_group(name))

    remove_group()
    actors: list[Any] = []
    try:
        group = ray.util.placement_group([resources.worker] * num, strategy="PACK", name=name)
        remote = ray.remote(
            num_cpus=resources.worker["CPU"],
            num_gpus=resources.worker.get("GPU", 0),
            max_restarts=resources.max_failures,
            max_task_retries=resources.max_failures,
            scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group),
        )(worker)
        actors.extend(remote.remote(job, *arguments) for _ in range(num))
        yield actors
    finally:
        for actor in actors:
            ray.kill(actor)
        remove_group()


def gang_name(worker: type, job: Any) -> str:
    """Of the placement group: the same for all starts that write to the job's folder."""
    return f"{worker.__name__}-{hashlib.sha256(job.out.encode()).hexdigest()[:16]}"


def ask(workers: Sequence[Any], method: str, *arguments: Any) -> list[Any]:
    """What `method` returned on each of a gang."""
    calls = [getattr(worker, method) for worker in workers]
    if not hasattr(calls[0], "remote"):
        return [call(*arguments) for call in calls]
    import ray

    return ray.get([call.remote(*arguments) for call in calls])


def each(workers: Sequence[Any], method: str, chunks: Sequence[Any]) -> Iterable[Any]:
    """What `method` returned for each chunk, as they are done, each on an idle one of a gang. Raises its errors."""
    if not chunks:
        return ()
    if not hasattr(getattr(workers[0], method), "remote"):
        return map(getattr(workers[0], method), chunks)
    from ray.util import ActorPool

    pool: Any = ActorPool(list(workers))
    return pool.map_unordered(lambda worker, chunk: getattr(worker, method).remote(chunk), chunks)
