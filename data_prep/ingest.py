"""The training stream: a finished dataset as an endless, ordered stream of rows through Ray Data.

Row order is a pure function of (seed, epoch): row groups are permuted, then the rows inside each. So the row at any
position of the stream is known without reading what comes before, training resumes in the middle of an epoch, and a
global batch is the same for any number of workers.

Words: the stream is epoch 0, epoch 1, ... one after another; `position` counts its rows. R side of an image, B rows.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import ray.data

from data_prep.parquet import Shard, open_dataset, permutation, pixel_column, pixels, read_shard
from data_prep.ray_compat import RestBetweenSteps, set_num_cpus

_TASK_BYTES = 16_000_000  # of pixels that one read task returns, about
_MAX_INPUT_BLOCKS = 2_000


@dataclass(frozen=True)
class _Stream:
    """Everything that decides the rows of a stream."""

    uri: str
    row_groups: tuple[tuple[Shard, int], ...]  # in the dataset's order
    seed: int

    @functools.cached_property
    def group_rows(self) -> np.ndarray:
        return np.array([shard.row_group_rows[index] for shard, index in self.row_groups], np.int64)

    @property
    def rows_per_epoch(self) -> int:
        return int(self.group_rows.sum())

    def pieces(self, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """(epoch, row group, first row, last row + 1) for the positions [begin, end); rows count in epoch order."""
        epoch, offset = divmod(begin, self.rows_per_epoch)
        left = end - begin
        while left > 0:
            order = permutation(len(self.row_groups), self.seed, epoch)
            ends = np.cumsum(self.group_rows[order])
            for i in range(int(np.searchsorted(ends, offset, side="right")), len(order)):
                rows = int(self.group_rows[order[i]])
                first = max(0, offset - (int(ends[i]) - rows))
                last = min(rows, first + left)
                yield epoch, int(order[i]), first, last
                left -= last - first
                if not left:
                    return
            epoch, offset = epoch + 1, 0

    def cut(self, begin: int, end: int, *, task_rows: int, multiple: int) -> list[int]:
        """Positions where read tasks begin, and the end: tasks of at least `task_rows` rows, a multiple of `multiple`,
        that end with a row group or as soon after it as the multiple allows."""
        cuts, position = [begin], begin
        for _, _, first, last in self.pieces(begin, end):
            position += last - first
            cut = min(end, begin + -(-(position - begin) // multiple) * multiple)
            if cut - cuts[-1] >= task_rows or (cut == end and cut > cuts[-1]):
                cuts.append(cut)
        return cuts


def train_stream(
    uri: str,
    *,
    resolution: int,
    bits: int,
    split: str = "train",
    seed: int,
    start_row: int,
    num_rows: int,
    rows_per_block: int | None = None,
    num_cpus_per_task: float = 0.25,
    num_read_tasks: int = 2,
) -> ray.data.Dataset:
    """The rows at positions [start_row, start_row + num_rows), in order; row groups before them are not read.

    uri                the dataset's folder
    rows_per_block     None for one consumer. For n workers: global batch / n; then streaming_split(n, equal=True)
                       hands block after block to worker after worker, so that their union is the global batch.
                       start_row and num_rows must then be multiples of the global batch
    num_cpus_per_task  logical CPUs of a read task; 0 where the workers may have taken all
    num_read_tasks     read tasks that may run at once

    Columns: key string, px (R * R * 3 bytes), epoch int32, position int64 (in the stream). Order is kept when the
    dataset is iterated directly; through Ray Train, DataConfig must set execution_options.preserve_order.
    Raises ValueError for an unfinished dataset, or a resolution, depth or split that it has not.
    """
    dataset = open_dataset(uri)
    shards = dataset.shards(resolution=resolution, bits=bits, split=split)
    groups = tuple((shard, i) for shard in shards for i in range(len(shard.row_group_rows)))
    stream = _Stream(uri, groups, seed)
    multiple = rows_per_block or 1
    assert start_row >= 0 and num_rows >= 1 and num_rows % multiple == 0, (start_row, num_rows, rows_per_block)
    task_rows = max(1, _TASK_BYTES // (resolution * resolution * 3))
    cuts = stream.cut(start_row, start_row + num_rows, task_rows=task_rows, multiple=multiple)
    spans = [{"begin": begin, "end": end} for begin, end in itertools.pairwise(cuts)]
    # from_items makes its blocks here; reading a range, or Arrow tables, takes tasks of a whole CPU, which a machine
    # whose CPUs the training workers hold does not have. Very many read tasks share a block: each costs memory.
    tasks = ray.data.from_items(spans, override_num_blocks=min(len(spans), _MAX_INPUT_BLOCKS))
    tasks.context.enable_progress_bars = False
    tasks.context.execution_options.preserve_order = True
    tasks.context.custom_execution_callback_classes.append(RestBetweenSteps)
    rows = tasks.map_batches(
        functools.partial(_read_task, stream=stream),
        batch_size=1,
        batch_format="pyarrow",
        num_cpus=num_cpus_per_task,
        compute=ray.data.TaskPoolStrategy(size=min(num_read_tasks, len(spans))),
    )
    if rows_per_block is not None:
        # Every task returns a multiple of it, so splitting alone, without `strict`, gives blocks of exactly this size.
        rows = rows.repartition(target_num_rows_per_block=rows_per_block)
        # With one worker on every CPU, tasks that take a whole one would never start. With equal demands Ray does the
        # splitting inside the read tasks.
        set_num_cpus(rows, num_cpus_per_task)
    return rows


def _read_task(task: pa.Table, *, stream: _Stream) -> pa.Table:
    """Runs in a Ray task: `task` is one row with the positions where it begins and ends."""

    @functools.cache  # of a tiny dataset a task may hold many epochs
    def row_group(group: int) -> pa.Table:
        shard, index = stream.row_groups[group]
        return read_shard(stream.uri, shard, row_group=index, columns=["key", "px"]).combine_chunks()

    (span,) = task.to_pylist()
    position, parts = span["begin"], []
    for epoch, group, first, last in stream.pieces(span["begin"], span["end"]):
        table = row_group(group)
        # + 1: numbers that end in zeros seed the same stream as without them, and the row groups' order has two.
        rows = permutation(table.num_rows, stream.seed, epoch, group + 1)[first:last]
        columns = {
            "key": table.column("key").take(rows),
            "px": pixel_column(pixels(table)[rows]),
            "epoch": np.full(len(rows), epoch, np.int32),
            "position": np.arange(position, position + len(rows)),
        }
        parts.append(pa.table(columns))
        position += len(rows)
    return pa.concat_tables(parts).combine_chunks()


def collate(batch: pa.Table) -> dict[str, np.ndarray]:
    """A batch of `iter_batches(batch_format="pyarrow")` -> px uint8 (B, R, R, 3), which may be read-only, key (B,) of
    str, epoch int32 (B,), position int64 (B,)."""
    return {"px": pixels(batch), **{name: batch.column(name).to_numpy() for name in ("key", "epoch", "position")}}
