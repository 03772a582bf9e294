"""One start of the pipeline: check, plan, lock the run folder, join or start Ray, open MLflow, run, sum up."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from PIL import Image
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from data_prep.files import FULL_DISK, Store, UserError, join, naming_full_disk, open_store
from data_prep.lock import Lock, described, refusal_to_share
from data_prep.parquet import open_dataset
from data_prep.verify import counts
from pipelines import cluster, pipeline, tracking
from pipelines.config import SAMPLE_IMAGES, SCORE_IMAGES, ExperimentConfig, UserImages
from pipelines.dag import plan as planning
from pipelines.dag import run as running
from pipelines.dag.attempts import ERROR
from pipelines.dag.masking import mask, mask_uris
from pipelines.dag.node import Node
from pipelines.dag.progress import Display
from pipelines.dag.run import BLOCKED, FAILED, NodeReport
from pipelines.loading import resolve_storage, to_yaml

DONE, NODE_FAILED = 0, 1
MARKER = "config.yaml"  # its `name` says whose run folder this is
OPTIONS = {"only": "--only", "rerun": "--rerun", "keep": "--keep", "start_from": "--from"}  # that choose nodes


def start(
    config: ExperimentConfig,
    *,
    only: Sequence[str] = (),
    dry_run: bool = False,
    images: UserImages | None = None,
    overrides: Sequence[str] = (),
    **chosen: Sequence[str],
) -> int:
    """Runs the config's nodes (`only` these, if any; with `images` the one that reads them), returns the exit code.

    overrides: the command line's, which name the launch in MLflow. chosen: rerun, keep and start_from of dag.plan.plan.
    Raises UserError before anything is written: for unknown nodes, for a run folder of another config or in use, for a
    cluster that is too small. And at the end, if nodes failed by nothing but mistakes that only they could find, such
    as a truncated archive.
    """
    store = run_folder(config)
    uri = tracking.default_uri(store, name=config.name, configured=config.tracking.uri)
    only = (images.node,) if images is not None else only
    # Before the raw images are listed: a name needs no data.
    planning.requested(pipeline.nodes(config, images=images, listed=False), only=only, **chosen)
    nodes = nodes_of(config, store, images=images)

    def make_plan() -> planning.Plan:
        return planning.plan(nodes, store, sources=pipeline.SOURCES, only=only, **chosen)

    lock = Lock(store)
    with accessing(store):
        plan, holder = make_plan(), lock.holder()
    if holder and not dry_run:  # at once: Ray takes a while to start, and memory from the start that is running
        raise UserError(refusal_to_share(store, holder))
    if dry_run:  # a start writes it to the run folder
        print(to_yaml(config))
    print(f"run folder: {store.uri}")
    if images is not None:
        print(images.describe(num_draws=config.sample.num_draws))
    if dry_run:
        if holder:
            print(f"in use by {described(holder)}")
        print("\n".join(plan.lines()), flush=True)
        return DONE
    session = _session(config, plan)
    try:
        running.refuse(plan.decisions, session.capacity)
        with locked(lock):
            with accessing(store):
                plan = make_plan()  # as it is now that nobody else writes
            if session is cluster.NONE:
                session = _session(config, plan)
            running.refuse(plan.decisions, session.capacity)
            before = store.read_bytes(MARKER) if store.exists(MARKER) else None
            if images is None:  # the run folder's config stays that of its pipeline
                store.write_text(MARKER, mask_uris(to_yaml(config)))
            print("\n".join(plan.lines()), flush=True)
            for shortfall in running.shortfalls(plan.decisions, session.resources):
                print(f"note: {shortfall} now; it waits until there is more")
            warm = running.warm_up(plan) if session.capacity else None
            options = [f"{OPTIONS[key]} {','.join(names)}" for key, names in {"only": only, **chosen}.items() if names]
            ledger = _ledger(config, store, uri, overrides, options)
            print("\n".join(f"{what:<12} {where}" for what, where in ledger.parent.links().items()), flush=True)
            reports = _run(plan, session, lock, ledger, warm)
            try:
                return _sum_up(reports, store, ledger.parent, whole=not only)
            except UserError:  # of this config, which is then not the one to go on with
                if before is not None:
                    store.write_bytes(MARKER, before)
                raise
    finally:
        cluster.disconnect()


def _session(config: ExperimentConfig, plan: planning.Plan) -> cluster.ClusterInfo:
    if all(decision.action not in (planning.RUN, planning.WAIT) for decision in plan.decisions):
        return cluster.NONE
    num_gpus = config.resources.num_gpus
    if num_gpus and not cluster.joins():
        import torch  # takes a second

        if num_gpus > (found := torch.cuda.device_count()):  # Ray takes any number for true
            raise UserError(f"resources.num_gpus is {num_gpus}; PyTorch can use {found} on this machine")
    return cluster.connect(num_cpus=config.resources.num_cpus, num_gpus=num_gpus)


def _ledger(
    config: ExperimentConfig, store: Store, uri: str, overrides: Sequence[str], options: Sequence[str]
) -> tracking.Ledger:
    """With the run of this launch, which is named by the config, by what was changed of it and by the nodes chosen."""
    ledger = tracking.Ledger(uri, experiment=config.name, run_folder=store.uri)
    changed = [word for word in overrides if not word.startswith(("storage=", "tracking.", "resources."))]
    name = mask(" ".join([config.name, *changed, *options]))[:250]  # longer ones are refused by some databases
    ledger.start_pipeline(
        tags={"config": config.name, "git_commit": cluster.git_commit(), tracking.NAME: name},
        params=dict(word.split("=", 1) for word in changed),  # the nodes' runs have their sections of the config
        config=to_yaml(config),
    )
    return ledger


def _run(
    plan: planning.Plan, session: cluster.ClusterInfo, lock: Lock, ledger: tracking.Ledger, warm: running.Warm | None
) -> dict[str, NodeReport]:
    display, status = Display(), "FAILED"
    try:
        reports = running.run(
            plan,
            tracker=ledger,
            display=display,
            capacity=session.capacity,
            git_commit=cluster.git_commit(),
            lock=lock,
            warm=warm,
        )
        status = "FAILED" if any(node.state == FAILED for node in reports.values()) else "FINISHED"
        return reports
    except KeyboardInterrupt:
        status = "KILLED"
        lock.release()  # before MLflow is waited for: this process may be killed meanwhile
        raise
    finally:
        display.close()
        ledger.close(status)


def _sum_up(reports: dict[str, NodeReport], store: Store, handle: tracking.RunHandle, *, whole: bool) -> int:
    """Prints how each node ended and where to look; the exit code."""
    print(flush=True)
    failed = {name: node for name, node in reports.items() if node.state == FAILED}
    if failed and all(node.is_user_error for node in failed.values()):
        raise UserError("; ".join(f"{name}: {node.error}" for name, node in failed.items()))
    if failed:
        for name, node in reports.items():
            if node.state == FAILED:
                print(f"{name} failed: {node.error}")
                if node.uri is not None:
                    print(f"  its log: {join(node.uri, ERROR)}")
            elif node.state == BLOCKED:
                print(f"{name} was not started: {node.error}")
        print("Fix the cause and run the same command again: it resumes from here; --rerun NODE runs a node afresh.")
        return NODE_FAILED
    if not whole:
        for name, node in reports.items():
            if node.state != planning.NOT_SELECTED:
                print(f"{name} {node.state}: {node.uri}")
    with handle.open() as run:
        print_summary(reports, store, run)
    return DONE


def print_summary(reports: Mapping[str, NodeReport], store: Store, run: tracking.NodeRun) -> None:
    """Prints bits/dim per stage and in all, the dataset's counts, and where to look; of each what this start has.

    Of user images only the latter: the dataset is not theirs. The launch's run gets the bits/dim and the sample grid.
    """
    console, uris = Console(), {name: node.uri for name, node in reports.items() if node.uri is not None}
    if "evaluate" in uris:
        results = json.loads(open_store(uris["evaluate"]).read_bytes("results.json"))
        console.print(bits_table(results))
        parts = {**results["stages"], "total": results["total"]}
        found = {f"test/bits_per_dim/{name}": part["bits_per_dim"] for name, part in parts.items()}
        run.log_history([{"step": 0, "time_ms": 1000 * time.time(), **found}])  # at once: MLflow's queue ends late
    if "sample" in uris:
        chain = open_store(uris["sample"]).read_bytes("samples/chain.png")
        run.log_image(Image.open(io.BytesIO(chain)), key="samples/chain")
    lines = []
    if "prepare_data" in uris and uris.keys().isdisjoint((SAMPLE_IMAGES, SCORE_IMAGES)):
        lines = counts(open_dataset(join(uris["prepare_data"], "dataset")).manifest)
    lines += [f"{what:<12} {where}" for what, where in {**publish(uris, store), **run.handle.links()}.items()]
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)  # it may hold names of files


def publish(uris: Mapping[str, str], store: Store) -> dict[str, str]:
    """Copies samples, report and what was made of user images to the run folder: {what: its path}.

    uris: of the nodes' attempts, which stay the truth. user_images/<use> holds what was made last.
    """
    made = {}
    for node, folder, file, what in (
        ("sample", "samples", "chain.png", "sample grid"),
        (SAMPLE_IMAGES, "user_images", "grid.png", "grid"),
        (SCORE_IMAGES, "user_images", "scores.csv", "scores"),
    ):
        if node in uris:
            source, target = open_store(uris[node]).sub(folder), folder
            if folder == "user_images":
                target = join(folder, json.loads(source.read_bytes("record.json"))["use"])
            store.delete(target)  # an earlier attempt may have had more images
            for entry in source.walk():
                store.write_bytes(join(target, entry.path), source.read_bytes(entry.path))
            made[what] = store.uri_of(join(target, file))
    if "report" in uris:
        store.write_bytes("report.html", open_store(uris["report"]).read_bytes("report.html"))
        made["report"] = store.uri_of("report.html")
    return made


def bits_table(results: Mapping) -> Table:
    """Exact bits/dim beside what a histogram of the training pixels and a uniform distribution need."""
    size, count = results["image_size"], results["num_images"]
    table = Table(title=f"bits/dim on {count} test images of {escape(results['dataset'])} {size}x{size}", min_width=60)
    table.add_column("part")
    for column in ("this model", "standard error", "histogram", "uniform"):
        table.add_column(column, justify="right")
    keys = ("bits_per_dim", "standard_error", "histogram", "uniform")
    for stage, part in results["stages"].items():
        table.add_row(stage, *(f"{part[key]:.3f}" for key in keys))
    table.add_section()
    table.add_row("total", *(f"{results['total'][key]:.3f}" for key in keys))
    if results["generated_bits"] == 8:
        table.caption = f"raw entropy {results['raw_entropy']:.3f}, PNG {results['png']:.3f}"
    return table


# ---- run folders ------------------------------------------------------------------------------------------------


def run_folder(config: ExperimentConfig) -> Store:
    """Raises UserError when it cannot be read or is another config's."""
    store = open_store(join(resolve_storage(config), config.name))
    with accessing(store):
        check_run_folder(store, name=config.name)
    return store


def check_run_folder(store: Store, *, name: str) -> dict[str, Any]:
    """Its config.yaml, {} in a new one. Raises UserError when it was made by a config of another name, or is none."""
    try:
        content = yaml.safe_load(store.read_bytes(MARKER))
    except FileNotFoundError:
        return {}
    except (yaml.YAMLError, UnicodeDecodeError):
        content = None
    owner = content.get("name") if isinstance(content, dict) else None
    if not isinstance(owner, str):
        raise UserError(f"{store.uri_of(MARKER)} has no config name: {store.uri} does not look like a run folder")
    if owner != name:
        raise UserError(f"{store.uri} is the run folder of config {owner!r}, not of {name!r}; choose another storage")
    return content


def check_photos(config: ExperimentConfig) -> None:
    """Raises UserError when the run folder was made from other photos, as it seems if overrides were forgotten."""
    store = run_folder(config)
    made_from, now = _roots(store, config)
    if made_from not in (None, now):
        what = f"{store.uri} was made from data.root={made_from}, this command has data.root={now}"
        if store.is_local:
            what += f"; --config {shlex.quote(store.uri_of(MARKER))} goes on with those photos"
        raise UserError(f"{what}; data.root=... says which you mean")


def nodes_of(config: ExperimentConfig, store: Store, *, images: UserImages | None = None) -> list[Node]:
    """The config's nodes. A run folder whose photos are gone since does with the dataset that it has."""
    made_from, now = _roots(store, config)
    nodes = pipeline.nodes(config, images=images, may_be_gone=made_from == now)
    if (root := config.data.root) is not None:
        photos = open_store(root)
        if photos.is_local == store.is_local and Path(store.base).is_relative_to(photos.base):
            raise UserError(f"storage: {store.uri} is below data.root, {root}; its pictures would be taken for photos")
    return nodes


def plan_of(config: ExperimentConfig, store: Store, *only: str) -> planning.Plan:
    """What a start of these nodes (of all, if none is named) would do."""
    return planning.plan(nodes_of(config, store), store, sources=pipeline.SOURCES, only=only)


def _roots(store: Store, config: ExperimentConfig) -> tuple[str | None, str]:
    """data.root of the config that the run folder was made with last (None in a new one), and of this one."""
    with accessing(store):
        data = check_run_folder(store, name=config.name).get("data")
    return str(data.get("root")) if isinstance(data, dict) else None, mask_uris(str(config.data.root))


@contextlib.contextmanager
def accessing(store: Store, *, what: str = "read the run folder") -> Iterator[None]:
    """An OSError in the block becomes a UserError, "cannot {what} {store.uri}: why", except that of a full disk."""
    try:
        with naming_full_disk(store.uri):
            yield
    except OSError as error:
        if error.errno in FULL_DISK:
            raise
        why = "nothing is there" if isinstance(error, FileNotFoundError) else error.strerror or error
        raise UserError(f"cannot {what} {store.uri}: {why}") from error


@contextlib.contextmanager
def removed_if_interrupted(target: Store) -> Iterator[None]:
    """Of a command that writes only where nothing is: the same command can then start over."""
    try:
        yield
    except KeyboardInterrupt:
        target.delete()
        raise


@contextlib.contextmanager
def locked(lock: Lock) -> Iterator[None]:
    with accessing(lock.store, what="write to the run folder"):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
