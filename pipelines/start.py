"""One start of the pipeline: check, plan, lock the run folder, join or start Ray, open MLflow, run, report."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

from pipelines import cluster, dag, progress, tracking
from pipelines import plan as planning
from pipelines.attempts import ERROR
from pipelines.config import ExperimentConfig, resolve_storage, to_yaml
from pipelines.errors import UserError
from pipelines.git import git_commit
from pipelines.lock import Lock
from pipelines.storage import Store, check_run_folder, claim_run_folder, join, open_store

DONE, NODE_FAILED = 0, 1


def start(
    config: ExperimentConfig,
    *,
    only: Sequence[str] = (),
    rerun: Sequence[str] = (),
    keep: Sequence[str] = (),
    dry_run: bool = False,
) -> int:
    """Runs the config's nodes (`only` these, if any) and returns the exit code.

    Raises UserError before anything is written: for unknown nodes, another config's run folder, a cluster too small.
    """
    from pipelines import pipeline

    store = open_store(join(resolve_storage(config), config.name))
    try:
        check_run_folder(store, name=config.name)
    except OSError as error:
        raise UserError(f"cannot read the run folder {store.uri}: {error.strerror or error}") from error
    # Before the source of images is looked at: a name needs no data.
    planning.check_names(pipeline.node_names(config), only=only, rerun=rerun, keep=keep)
    nodes = pipeline.nodes(config)
    plan = dag.plan(nodes, store, only=only, rerun=rerun, keep=keep)
    print(to_yaml(config))
    print(f"run folder: {store.uri}")
    if dry_run:
        print("\n".join(plan.lines()))
        return DONE
    session = cluster.connect(num_cpus=config.resources.num_cpus)
    try:
        for decision in plan.decisions:
            if decision.node.name in plan.will_run:
                session.check_fits(decision.node.name, decision.node.total_cost)
        with _locked(store) as lock:
            claim_run_folder(store, name=config.name, config_yaml=to_yaml(config))
            plan = dag.plan(nodes, store, only=only, rerun=rerun, keep=keep)  # as it is now that nobody else writes
            print("\n".join(plan.lines()), flush=True)
            report, uri = _run(plan, config, session, store, lock)
            return _say_how_it_ended(report, store, tracking_uri=uri, whole=not only)
    finally:
        cluster.disconnect()


@contextlib.contextmanager
def _locked(store: Store) -> Iterator[Lock]:
    lock = Lock(store)
    try:
        lock.acquire()
    except OSError as error:
        raise UserError(f"cannot write to the run folder {store.uri}: {error.strerror or error}") from error
    try:
        yield lock
    finally:
        lock.release()


def _run(
    plan: dag.Plan, config: ExperimentConfig, session: cluster.ClusterInfo, store: Store, lock: Lock
) -> tuple[dag.RunReport, str]:
    """The report and the tracking URI."""
    uri, artifacts = tracking.default_uri(store, name=config.name, configured=config.tracking.uri)
    ledger = tracking.Ledger(uri, experiment=config.name, run_folder=store.uri, artifacts=artifacts)
    ledger.start_pipeline(
        tags={"config": config.name, "git_commit": git_commit()},
        params=dataclasses.asdict(config),
        files={"config.yaml": to_yaml(config)},
    )
    display = progress.make_display()
    status = "FAILED"
    try:
        report = dag.run(plan, cluster=session, ledger=ledger, display=display, lock=lock)
        status = "FINISHED" if report.ok else "FAILED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        display.close()
        ledger.close(status)
    return report, uri


def _say_how_it_ended(report: dag.RunReport, store: Store, *, tracking_uri: str, whole: bool) -> int:
    from pipelines import summary

    print()
    if not report.ok:
        for name, node in report.nodes.items():
            if node.state == "failed":
                print(f"{name} failed: {node.error}\n  its log: {join(node.uri or '', ERROR)}")
            elif node.state == "blocked":
                print(f"{name} was not started: {node.error}")
        print("The same command goes on from here; --rerun NODE starts a node afresh.", flush=True)
        return NODE_FAILED
    if whole:
        summary.print_summary(report, store=store, tracking_uri=tracking_uri)
        return DONE
    for name, node in report.nodes.items():
        if node.state != "not selected":
            print(f"{name} {node.state}: {node.uri}")
            if name == "prepare_data":
                print("\n".join(summary.data_lines(report)))
    for what, path in summary.publish(report, store).items():
        print(f"{what}: {path}")
    print(f"MLflow: {tracking.ui_command(tracking_uri)}", flush=True)
    return DONE
