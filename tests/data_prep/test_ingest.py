"""The training stream's order, resume and split over workers.  pytest tests/data_prep/test_ingest.py"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

from data_prep import ingest
from data_prep.build import build
from data_prep.config import DataConfig
from data_prep.parquet import open_dataset, pixels

pytestmark = pytest.mark.usefixtures("ray_session")


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory, make_photos, ray_session) -> str:
    """95 tiles in four shards, in row groups of 10 and fewer."""
    folder = tmp_path_factory.mktemp("ingest")
    make_photos(folder / "raw", 6)
    config = DataConfig(
        dataset="photos",
        root=str(folder / "raw"),
        image_size=8,
        resolutions=[8],
        bits=[3, 8],
        crop="tiles",
        tile_size=16,
        tile_stride=14,
        num_test_photos=1,
        rows_per_shard=30,
        row_group_rows=10,
    )
    build(config, out=str(folder / "set"), progress=lambda *_: None)
    return str(folder / "set")


@pytest.fixture(scope="module", autouse=True)
def every_row_group_is_a_task() -> Iterator[None]:
    """Otherwise one task would return all of these few rows, and nothing could come out of order."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ingest, "_TASK_BYTES", 1)
        yield


@pytest.fixture(scope="module")
def whole(uri: str, every_row_group_is_a_task: None) -> dict:
    """Three epochs without a break, of seed 3."""
    return stream(uri, 0, 3 * open_dataset(uri).num_images("train"))


def stream(uri: str, start_row: int, num_rows: int, *, seed: int = 3, bits: int = 8, batch: int = 16) -> dict:
    dataset = ingest.train_stream(uri, resolution=8, bits=bits, seed=seed, start_row=start_row, num_rows=num_rows)
    batches = [ingest.collate(b) for b in dataset.iter_batches(batch_size=batch, batch_format="pyarrow")]
    return {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}


def test_every_image_once_an_epoch_with_its_own_pixels(uri: str, whole: dict):
    table = open_dataset(uri).read(resolution=8, bits=8, split="train")
    n, rows = table.num_rows, whole
    expected = dict(zip(table.column("key").to_pylist(), pixels(table), strict=True))
    assert rows["px"].dtype == np.uint8 and rows["epoch"].dtype == np.int32 and rows["position"].dtype == np.int64
    assert np.array_equal(rows["position"], np.arange(3 * n)) and np.array_equal(rows["epoch"], np.arange(3 * n) // n)
    orders = [tuple(rows["key"][epoch * n : (epoch + 1) * n]) for epoch in range(3)]
    assert all(set(order) == set(expected) for order in orders) and len(set(orders)) == 3
    assert all(np.array_equal(px, expected[key]) for key, px in zip(rows["key"], rows["px"], strict=True))


def test_order_is_decided_by_the_seed_and_not_by_depth(uri: str, whole: dict):
    keys = whole["key"][:60].tolist()
    assert stream(uri, 0, 60, seed=4)["key"].tolist() != keys
    low = stream(uri, 0, 60, bits=3)
    assert low["key"].tolist() == keys and np.array_equal(low["px"], whole["px"][:60] >> 5)


def test_started_anywhere_it_is_the_tail_of_the_unbroken_stream(uri: str, whole: dict):
    num_rows = len(whole["position"])
    for start in (37, num_rows // 3, 2 * num_rows // 3 + 5):
        tail = stream(uri, start, num_rows - start, batch=7)
        assert all(np.array_equal(tail[name], whole[name][start:]) for name in whole), start


@pytest.fixture
def plan(uri: str) -> ingest._Stream:
    """Of seed 3."""
    shards = open_dataset(uri).shards(resolution=8, bits=8, split="train")
    groups = tuple((shard, i) for shard in shards for i in range(len(shard.row_group_rows)))
    return ingest._Stream(uri, groups, seed=3)


def test_a_task_reads_each_row_group_that_it_needs_once(plan: ingest._Stream, monkeypatch: pytest.MonkeyPatch):
    """A few of one epoch, or all in each of many epochs."""
    read, opened = ingest.read_shard, []
    monkeypatch.setattr(ingest, "read_shard", lambda *a, **k: opened.append(k["row_group"]) or read(*a, **k))
    start, num_groups = plan.rows_per_epoch * 5 - 25, len(plan.row_groups)
    assert num_groups > 6
    for begin, end, least, most in (
        (start, start + 25, 3, 6),
        (0, 4 * plan.rows_per_epoch, num_groups, num_groups),
    ):
        opened.clear()
        table = ingest._read_task(pa.table({"begin": [begin], "end": [end]}), stream=plan)
        assert table.column("position").to_pylist() == list(range(begin, end))
        assert least <= len(opened) <= most


def test_the_order_of_row_groups_follows_the_seed(plan: ingest._Stream):
    """And with it that of rows far apart, which no order within a row group changes."""
    orders = [
        [group for _, group, _, _ in dataclasses.replace(plan, seed=seed).pieces(0, plan.rows_per_epoch)]
        for seed in (3, 4)
    ]
    assert sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1]


def test_tasks_end_with_row_groups_and_have_a_bounded_size(plan: ingest._Stream):
    ends = set(np.cumsum([last - first for _, _, first, last in plan.pieces(0, 2_000)]).tolist())
    for multiple in (1, 4):
        cuts = plan.cut(7, 907, task_rows=25, multiple=multiple)
        assert cuts[0] == 7 and cuts[-1] == 907
        sizes = np.diff(cuts)
        assert (sizes[:-1] >= 25).all() and (sizes < 25 + 10 + multiple).all() and (sizes % multiple == 0).all()
        assert all(ends & set(range(cut - multiple + 1, cut + 1)) for cut in cuts[1:-1])
    assert plan.cut(3, 7, task_rows=100, multiple=4) == [3, 7]


def test_global_batch_does_not_depend_on_the_number_of_workers(uri: str):
    """Worker r of n gets rows [r G / n, (r + 1) G / n) of each global batch of G rows, at n speeds."""
    num_workers, global_batch, num_steps, start = 3, 12, 9, 36
    share = global_batch // num_workers
    dataset = ingest.train_stream(
        uri,
        resolution=8,
        bits=8,
        seed=3,
        start_row=start,
        num_rows=global_batch * num_steps,
        rows_per_block=share,
    )
    positions: list[list] = [[] for _ in range(num_workers)]

    def work(rank: int, shard) -> None:
        for batch in shard.iter_batches(batch_size=share, batch_format="pyarrow", prefetch_batches=rank):
            positions[rank].append(ingest.collate(batch)["position"])

    shards = dataset.streaming_split(num_workers, equal=True)
    threads = [threading.Thread(target=work, args=(rank, shard)) for rank, shard in enumerate(shards)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    expected = np.arange(start, start + global_batch * num_steps).reshape(num_steps, num_workers, share)
    for rank in range(num_workers):
        assert np.array_equal(positions[rank], expected[:, rank])


def test_bad_arguments_are_named(uri: str):
    good = dict(resolution=8, bits=8, seed=0, start_row=0, num_rows=10)
    for name, value in [("bits", 5), ("resolution", 7), ("split", "valid")]:
        with pytest.raises(ValueError, match=f"{name} is {value!r}"):
            ingest.train_stream(uri, **{**good, name: value})


def test_it_runs_beside_workers_that_hold_all_but_a_quarter_of_a_cpu(uri: str):
    import ray

    holder = ray.remote(_Holder).options(num_cpus=1.75).remote()
    ray.get(holder.here.remote())
    try:
        dataset = ingest.train_stream(uri, resolution=8, bits=8, seed=0, start_row=0, num_rows=40, rows_per_block=4)
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.extend(row["position"] for row in dataset.iter_rows()))
        thread.daemon = True
        thread.start()
        thread.join(timeout=60)
        assert found == list(range(40))
    finally:
        ray.kill(holder)


class _Holder:
    def here(self) -> None:
        pass
