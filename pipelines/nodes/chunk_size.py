"""How many images are drawn at once: as configured, or as many as the GPU's memory holds.

Settled once for an attempt, before anything is drawn, and recorded: in half precision the same image of another chunk
may round differently, so whoever goes on with the attempt reads the record. spn/footprint.py counts the bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from data_prep.files import Store, UserError
from spn.config import SPNConfig

if TYPE_CHECKING:
    from pipelines.config import NodeResources

RECORD = "chunks.json"
ON_CPU = 16  # one thread computes a chunk, and what is finished of it is kept only when all of it is


def settle(
    config: Mapping[str, Any],
    *,
    num_images: int,
    configs: Mapping[str, SPNConfig],
    store: Store,
    resources: NodeResources,
) -> int:
    """Images a chunk: batch_size of the node's config, or what an earlier start of the attempt recorded in `store`, or
    else what is chosen now, for the config's precision, and recorded there.

    On a GPU that is the largest batch that fits next to nothing else, but not more than each worker's share.
    """
    if config["batch_size"] is not None:
        return config["batch_size"]
    if store.exists(RECORD):
        return json.loads(store.read_bytes(RECORD))["batch_size"]
    record: dict[str, Any] = {"batch_size": ON_CPU, "device": resources.device}
    if resources.use_gpu:
        from spn.footprint import MOST, largest_batch

        precision = config["precision"]
        free = _free_bytes_of_workers(resources)
        share = min(-(-num_images // resources.num_workers), MOST)
        size = largest_batch(list(configs.values()), free, precision=precision, most=share)
        if size == 0:
            raise UserError(refusal(1, configs, free, precision=precision) or "")
        record = {**record, "batch_size": size, "free_bytes": free, "num_workers": resources.num_workers}
    store.write_text(RECORD, json.dumps(record, indent=1))
    return record["batch_size"]


def refusal(batch: int, configs: Mapping[str, SPNConfig], free_bytes: int, *, precision: str) -> str | None:
    """One line if batches of this size do not fit into so much memory of a GPU, with the largest that does."""
    from spn.footprint import batch_bytes, largest_batch

    networks: Sequence[SPNConfig] = list(configs.values())
    largest = largest_batch(networks, free_bytes, precision=precision, most=batch)
    if largest >= batch:
        return None
    taken = batch_bytes(networks, batch, precision=precision)
    nearest = f"the largest that fits is {largest}" if largest else "not even one image fits"
    return (
        f"sample.batch_size: {batch} at once would take {_gib(taken)} for {', '.join(configs)} in {precision}, "
        f"of a GPU with {_gib(free_bytes)}; {nearest}"
    )


def free_gpu_bytes() -> int:
    """Of the GPU that this process was given; makes its context on it."""
    import torch

    return torch.cuda.mem_get_info()[0]


def largest_gpu_bytes() -> int | None:
    """Memory of the largest NVIDIA GPU of this machine; None where its driver shows none."""
    try:
        import pynvml
    except ModuleNotFoundError:  # it is there on Linux alone
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver
        return None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        return max((pynvml.nvmlDeviceGetMemoryInfo(handle).total for handle in handles), default=None)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _free_bytes_of_workers(resources: NodeResources) -> int:
    """The least that one of the GPUs has which the workers will get."""
    import ray

    options = {"num_cpus": resources.cpus_per_worker, "num_gpus": resources.gpus_per_worker}
    ask = ray.remote(**options, max_retries=resources.max_failures)(free_gpu_bytes)
    return min(ray.get([ask.remote() for _ in range(resources.num_workers)]))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
