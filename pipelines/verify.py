"""prepare_data.py --verify: re-reads a finished data set and prints what is wrong, or what it holds."""

from __future__ import annotations

from data_prep.card import counts
from data_prep.files import UserError, join, open_store
from data_prep.parquet import open_dataset
from data_prep.verify import verify
from pipelines.config import ExperimentConfig
from pipelines.dag import plan
from pipelines.dag.progress import Display, Update
from pipelines.loading import resolve_storage
from pipelines.project import SOURCES

INTACT, DAMAGED = 0, 1
NODE = "prepare_data"


def verify_data(uri: str) -> int:
    """Checks the data set at `uri` (path or URI) and returns the exit code. Raises UserError where there is none."""
    try:
        manifest = open_dataset(uri).manifest
        display = Display()
        try:
            problems = verify(uri, progress=lambda done, total: display.show({"verify": Update(done, total, "images")}))
        finally:
            display.close()
    except (OSError, ValueError) as error:
        raise UserError(f"--verify {uri}: {error}") from error
    if problems:
        print("\n".join(problems))
        print(f"damaged: {uri} (problems: {len(problems)}; to build it anew: --rerun {NODE})")
        return DAMAGED
    print("\n".join(counts(manifest)))
    print(f"intact: {uri} ({len(manifest.shards)} files, {sum(shard.bytes for shard in manifest.shards)} bytes)")
    return INTACT


def dataset_of(config: ExperimentConfig) -> str:
    """URI of the data set that the config's nodes would read now. Raises UserError when it is not built."""
    from pipelines import pipeline
    from pipelines.start import check_run_folder

    store = open_store(join(resolve_storage(config), config.name))
    check_run_folder(store, name=config.name)
    decision = plan.plan(pipeline.nodes(config), store, sources=SOURCES, only=[NODE])[NODE]
    if decision.success is None:
        raise UserError(f"--verify: config {config.name} has no finished data set ({decision.reason}); build it first")
    output = decision.success.output(store)
    return join(output.uri, output.named["dataset"])
