"""One start of the pipeline: check, plan, lock the run folder, join or start Ray, open MLflow, run, report."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from pipelines import cluster, dag, progress, tracking
from pipelines.config import ExperimentConfig, resolve_storage, to_yaml
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
    check_run_folder(store, name=config.name)
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
        with Lock(store) as lock:
            claim_run_folder(store, name=config.name, config_yaml=to_yaml(config))
            plan = dag.plan(nodes, store, only=only, rerun=rerun, keep=keep)  # as it is now that nobody else writes
            print("\n".join(plan.lines()), flush=True)
            report, uri = _run(plan, config, session, store, lock)
    finally:
        cluster.disconnect()
    return _say_how_it_ended(report, config, store, uri, whole=not only)


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


def _say_how_it_ended(
    report: dag.RunReport, config: ExperimentConfig, store: Store, tracking_uri: str, *, whole: bool
) -> int:
    print()
    if not report.ok:
        for name, node in report.nodes.items():
            if node.state == "failed":
                print(f"{name} failed: {node.error}\n  its log: {join(node.uri or '', 'error.txt')}")
            elif node.state == "blocked":
                print(f"{name} was not started: {node.error}")
        print("The same command goes on from here.", flush=True)
        return NODE_FAILED
    if whole:
        from pipelines import summary

        summary.print_summary(config=config, report=report, store=store)
        print(f"samples:  {store.uri_of('samples')}")
        print(f"report:   {store.uri_of('report.html')}")
    else:
        for name, node in report.nodes.items():
            if node.state != "not selected":
                print(f"{name} {node.state}: {node.uri}")
    print(f"MLflow:   {_runnable(tracking.ui_command(tracking_uri))}", flush=True)
    return DONE


def _runnable(command: str) -> str:
    """With the path of this environment's program where the shell would not find it."""
    if command.startswith("mlflow ") and shutil.which("mlflow") is None:
        return str(Path(sys.executable).parent / command)
    return command
