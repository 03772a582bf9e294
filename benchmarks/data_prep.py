"""Speed and memory of the dataset build, against a plain process pool, and of reading for training.

    python benchmarks/data_prep.py build --raw FOLDER --cores 2 --out benchmarks/results/data
    python benchmarks/data_prep.py memory --raw FOLDER --out benchmarks/results/data
    python benchmarks/data_prep.py read --raw FOLDER --out benchmarks/results/data

FOLDER holds photos; they are copied under distinct keys until there are --images of them. Pool and Ray use the same
functions to decode and resize, and take turns, --repeats times. Each waits until the disk has written everything,
then pauses: a virtual machine returns freed memory to its host, and a run that starts at once would still find it.
The pool is what one would write without this project: each task decodes the photos of a shard, resizes them and
writes Parquet files with the same settings, but without checksums, quarantine or resuming; its tasks are smaller
(--pool-rows), because fresh memory slows large ones. `pool` ends a task with fsync of its files, as the build does;
`pool_cached` deletes the files before they reach the disk. images_per_sec leaves out start-up and commit (the slope
between a small set and the whole one); images_per_sec_all_in includes them. `cpu_ms` is CPU time per image of the
whole machine, kernel included, so nothing else should run.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # Ray stays on loopback
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DATA_USE_DATASOURCE_V2", "0")
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])

from data_prep import images, ingest
from data_prep.build import build
from data_prep.config import DataConfig
from data_prep.parquet import low_depth, open_dataset, pixel_column

RESOLUTIONS, BITS = [32, 64, 128, 256], [3, 8]
LIBRARIES = ("numpy", "pillow", "pyarrow", "ray", "simplejpeg")
READ_BATCH = 64  # images
PAUSE_SEC = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["build", "memory", "read"])
    parser.add_argument("--raw", type=Path, required=True, help="folder of photos")
    parser.add_argument("--images", type=int, default=8_000)
    parser.add_argument("--rows-per-shard", type=int, default=2_000)
    parser.add_argument(
        "--pool-rows", type=int, default=500, help="of a pool's task, which keeps all it decodes in memory"
    )
    parser.add_argument("--cores", type=int, default=2, help="the processes are bound to so many")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    arguments = parser.parse_args()
    allowed = sorted(os.sched_getaffinity(0))[: arguments.cores]
    os.sched_setaffinity(0, allowed)  # children inherit it
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        place = Path(folder)
        if arguments.what == "build":
            result = measure_build(arguments, place)
        elif arguments.what == "memory":
            result = measure_memory(arguments, place)
        else:
            result = measure_read(arguments, place)
    words = ["python", "benchmarks/data_prep.py", *sys.argv[1:]]
    words[words.index("--raw") + 1] = "FOLDER"
    result = {"command": " ".join(words), "machine": machine(len(allowed)), **result}
    print(json.dumps(result, indent=1), flush=True)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        cores = f"-{arguments.cores}core" if arguments.what == "build" else ""
        (arguments.out / f"{arguments.what}{cores}.json").write_text(json.dumps(result, indent=1) + "\n")


def machine(cores: int) -> dict:
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ": ?")
    return {
        "cpu": model.split(":")[1].strip(),
        "cores_used": cores,
        "load_1min": round(os.getloadavg()[0], 1),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in LIBRARIES},
    }


# ---- what is measured ----------------------------------------------------------------------------------------------


def measure_build(arguments: argparse.Namespace, place: Path) -> dict:
    """`few` takes what a build takes that has next to nothing to do: start-up and commit."""
    sets = {"few": (8 * arguments.cores, 4), "all": (arguments.images, arguments.rows_per_shard)}
    names = {name: copy_photos(arguments.raw, place / name, number) for name, (number, _) in sets.items()}
    runs: dict[str, list[dict]] = {"ray": [], "pool": [], "pool_cached": []}
    with ray_session(arguments.cores), multiprocessing.get_context("spawn").Pool(arguments.cores) as pool:

        def ray_job(name: str) -> None:
            config = data_config(place / name, arguments, rows_per_shard=sets[name][1])
            build(config, out=str(place / "set"), progress=lambda *_: None, num_cpus_per_task=1)

        def pool_job(name: str, function: Callable) -> None:
            paths, rows = [str(place / name / n) for n in names[name]], min(arguments.pool_rows, sets[name][1])
            pool.map(function, [paths[i : i + rows] for i in range(0, len(paths), rows)], chunksize=1)

        jobs = {
            "ray": ray_job,
            "pool": functools.partial(pool_job, function=plain_shard),
            "pool_cached": functools.partial(pool_job, function=plain_shard_cached),
        }
        for repeat in range(-1, arguments.repeats):
            for name, job in jobs.items():
                times = {}
                for images_ in ("few", "all") if repeat >= 0 else ("few",):  # at first only to warm up
                    os.sync()
                    time.sleep(PAUSE_SEC if images_ == "all" else 0)
                    times[images_] = timed(functools.partial(job, images_))
                    if name == "ray" and images_ == "all":
                        sizes = file_sizes(place / "set")
                    for folder in ("set", "plain"):
                        shutil.rmtree(place / folder, ignore_errors=True)
                if repeat >= 0:
                    runs[name].append(rates(times, {name: number for name, (number, _) in sets.items()}))
            print({name: found[-1:] for name, found in runs.items()}, file=sys.stderr, flush=True)
    median = {
        name: {key: statistics.median(run[key] for run in found) for key in found[0]} for name, found in runs.items()
    }

    def ratio(pool: str, key: str) -> float:
        pairs = zip(runs["ray"], runs[pool], strict=True)
        return round(statistics.median(ray[key] / plain[key] for ray, plain in pairs), 3)

    return {
        "images": arguments.images,
        "rows_per_shard": arguments.rows_per_shard,
        "rows_per_pool_task": min(arguments.pool_rows, arguments.rows_per_shard),
        "resolutions": RESOLUTIONS,
        "bits": BITS,
        "bytes_per_image": {
            "raw": round(sum(f.stat().st_size for f in (place / "all").iterdir()) / arguments.images),
            **sizes,
        },
        "ray_to_pool": ratio("pool", "images_per_sec"),
        "ray_to_pool_cached": ratio("pool_cached", "images_per_sec"),
        "ray_to_pool_all_in": ratio("pool", "images_per_sec_all_in"),
        "ray_to_pool_cached_all_in": ratio("pool_cached", "images_per_sec_all_in"),
        "median": median,
        "runs": runs,
    }


def measure_memory(arguments: argparse.Namespace, place: Path) -> dict:
    """Peak of all processes of the build together, shared pages counted once (PSS)."""
    peaks = {}
    for number in (500, 5_000, 20_000):
        copy_photos(arguments.raw, place / f"raw{number}", number)
        config = data_config(place / f"raw{number}", arguments)
        with ray_session(arguments.cores):
            before = sum(pss(process) for process in family())
            with peak_memory() as peak:
                build(config, out=str(place / "set"), progress=lambda *_: None, num_cpus_per_task=1)
            peaks[number] = {name: round(value / 2**20) for name, value in {"idle": before, **peak}.items()}
        shutil.rmtree(place / "set")
    return {"unit": "MiB", "rows_per_shard": arguments.rows_per_shard, "peaks": peaks}


def measure_read(arguments: argparse.Namespace, place: Path) -> dict:
    """Images a second through train_stream, iter_batches and collate, the first batch not counted."""
    copy_photos(arguments.raw, place / "raw", arguments.images)
    rates: dict[str, list[float]] = {}
    with ray_session(arguments.cores):
        build(data_config(place / "raw", arguments), out=str(place / "set"), progress=lambda *_: None)
        uri = str(place / "set")
        for resolution, num_rows in ((32, 200_000), (64, 40_000), (128, 20_000), (256, 8_000)):
            for repeat in range(arguments.repeats):
                stream = ingest.train_stream(
                    uri, resolution=resolution, bits=8, seed=repeat, start_row=0, num_rows=num_rows
                )
                seen, start = 0, 0.0
                for batch in stream.iter_batches(batch_size=READ_BATCH, batch_format="pyarrow", prefetch_batches=2):
                    rows = ingest.collate(batch)
                    assert rows["px"].shape[1:] == (resolution, resolution, 3)
                    if not start:
                        start = time.perf_counter()
                    else:
                        seen += len(rows["px"])
                rate = seen / (time.perf_counter() - start)
                rates.setdefault(str(resolution), []).append(round(rate))
    return {
        "batch_size": READ_BATCH,
        "images_per_sec": {resolution: statistics.median(found) for resolution, found in rates.items()},
        "runs": rates,
    }


# ---- the plain way -------------------------------------------------------------------------------------------------


def plain_shard(paths: list[str]) -> None:
    """Writes the photos' Parquet files beside their folder, and to the disk."""
    for path in plain_shard_cached(paths):
        with open(path, "rb") as stream:
            os.fsync(stream.fileno())


def plain_shard_cached(paths: list[str]) -> list[Path]:
    """Leaves it to the kernel when the files reach the disk."""
    squares = {resolution: np.empty((len(paths), resolution, resolution, 3), np.uint8) for resolution in RESOLUTIONS}
    for i, path in enumerate(paths):
        square = images.center_crop(images.decode(Path(path).read_bytes(), profile="tf").pixels)
        for resolution, array in images.resize_squares(square, RESOLUTIONS, profile="tf").items():
            squares[resolution][i] = array
    names = [Path(path).name for path in paths]
    folder = Path(paths[0]).parents[1] / "plain"
    folder.mkdir(exist_ok=True)
    written = []
    for resolution, array in squares.items():
        for bits in BITS:
            table = pa.table({"key": names, "px": pixel_column(low_depth(array, bits))})
            written.append(folder / f"{resolution}-{bits}-{names[0]}.parquet")
            rows = max(1, 16_000_000 // (resolution**2 * 3))
            options = dict(compression="zstd", compression_level=1, use_dictionary=False, row_group_size=rows)
            pq.write_table(table, written[-1], write_statistics=["key"], **options)
    return written


# ---- tools ---------------------------------------------------------------------------------------------------------


def file_sizes(dataset: Path) -> dict[str, int]:
    """Bytes per image at each resolution and depth, {"res=32/bits=3": ...}."""
    manifest = open_dataset(str(dataset)).manifest
    sizes: dict[str, int] = {}
    for shard in manifest.shards:
        name = f"res={shard.resolution}/bits={shard.bits}"
        sizes[name] = sizes.get(name, 0) + shard.bytes
    return {name: round(size / sum(manifest.num_images.values())) for name, size in sizes.items()}


def copy_photos(source: Path, target: Path, number: int) -> list[str]:
    """Names of `number` copies, each file again and again under other names."""
    found = sorted(path for path in source.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    assert found, f"{source} has no photos"
    target.mkdir()
    names = []
    for i in range(number):
        path = found[i % len(found)]
        names.append(f"{i // len(found):03d}_{i % len(found):05d}{path.suffix}")
        shutil.copyfile(path, target / names[-1])
    return names


def data_config(root: Path, arguments: argparse.Namespace, rows_per_shard: int | None = None) -> DataConfig:
    return DataConfig(
        dataset="bench",
        source="folder",
        root=str(root),
        image_size=RESOLUTIONS[-1],
        resolutions=RESOLUTIONS,
        bits=BITS,
        rows_per_shard=rows_per_shard or arguments.rows_per_shard,
    )


@contextlib.contextmanager
def ray_session(cores: int) -> Iterator[None]:
    import ray

    ray.init(address="local", num_cpus=cores, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def family() -> list[psutil.Process]:
    me = psutil.Process()
    return [me, *me.children(recursive=True)]


def timed(job: Callable[[], object]) -> tuple[float, float]:
    """(seconds, CPU seconds of the whole machine)."""
    before, start = _cpu(), time.perf_counter()
    job()
    return time.perf_counter() - start, _cpu() - before


def rates(times: dict[str, tuple[float, float]], numbers: dict[str, int]) -> dict[str, float]:
    (few_sec, _), (all_sec, all_cpu) = times["few"], times["all"]
    return {
        "images_per_sec": round((numbers["all"] - numbers["few"]) / (all_sec - few_sec), 1),
        "images_per_sec_all_in": round(numbers["all"] / all_sec, 1),
        "few_sec": round(few_sec, 2),
        "cpu_ms": round(1e3 * all_cpu / numbers["all"], 3),
    }


def _cpu() -> float:
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq


def pss(process: psutil.Process) -> int:
    try:
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")), 0)


@contextlib.contextmanager
def peak_memory() -> Iterator[dict[str, int]]:
    """Filled while the block runs: all processes together, and the largest one."""
    peak = {"all": 0, "largest_process": 0}
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.2):
            found = [pss(process) for process in family()]
            peak["all"] = max(peak["all"], sum(found))
            peak["largest_process"] = max(peak["largest_process"], *found)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


if __name__ == "__main__":
    main()
