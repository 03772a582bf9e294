"""What a start leaves for people: copies of samples and report in the run folder, and the table on the screen."""

from __future__ import annotations

import json
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from data_prep import card
from data_prep.files import Store, join, open_store
from data_prep.parquet import open_dataset
from pipelines.dag.run import RunReport
from pipelines.nodes.images import SAMPLE, SCORE

DATASET, SAMPLES, REPORT = "dataset", "samples", "report.html"
OWN, RECORD = "user_images", "record.json"  # of the nodes sample_images and score_images


def publish(report: RunReport, store: Store) -> dict[str, str]:
    """Copy the current samples and report into the run folder: {what: its path}. The nodes' folders stay the truth."""
    made = {}
    sample, page = report.nodes.get("sample"), report.nodes.get("report")
    if sample is not None and sample.uri is not None:
        source = open_store(sample.uri)
        kept = set()
        for entry in source.walk(SAMPLES):
            store.write_bytes(entry.path, source.read_bytes(entry.path))
            kept.add(entry.path)
        for entry in store.walk(SAMPLES):
            if entry.path not in kept:  # of an earlier attempt with more images
                store.delete(entry.path)
        made["sample grid"] = store.uri_of(f"{SAMPLES}/chain.png")
    made.update(_publish_own(report, store))
    if page is not None and page.uri is not None:
        store.write_bytes(REPORT, open_store(page.uri).read_bytes(REPORT))
        made["report"] = store.uri_of(REPORT)
    return made


def _publish_own(report: RunReport, store: Store) -> dict[str, str]:
    """Copies what was made of the user's images to user_images/<use or scores>/, which then holds the latest."""
    made = {}
    for name, what in ((SAMPLE, "grid"), (SCORE, "scores")):
        node = report.nodes.get(name)
        if node is None or node.uri is None:
            continue
        source = open_store(node.uri).sub(OWN)
        use = json.loads(source.read_bytes(RECORD))["use"]
        store.delete(f"{OWN}/{use}")
        for entry in source.walk():
            store.write_bytes(f"{OWN}/{use}/{entry.path}", source.read_bytes(entry.path))
        made[what] = store.uri_of(f"{OWN}/{use}/{'grid.png' if name == SAMPLE else 'scores.csv'}")
    return made


def print_summary(report: RunReport, *, store: Store, mlflow: str, console: Console | None = None) -> None:
    """Prints bits/dim per stage and in all, the dataset's counts, and where to look; of each what this start has."""
    console = console or Console()
    evaluated, data = report.nodes.get("evaluate"), report.nodes.get("prepare_data")
    if evaluated is not None and evaluated.uri is not None:
        console.print(bits_table(json.loads(open_store(evaluated.uri).read_bytes("results.json"))))
    lines = card.counts(open_dataset(join(data.uri, DATASET)).manifest) if data is not None and data.uri else []
    lines += [f"{what:<12} {where}" for what, where in {**publish(report, store), "MLflow": mlflow}.items()]
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)


def bits_table(results: Mapping) -> Table:
    """Exact bits/dim beside what a histogram of the training pixels and a uniform distribution need."""
    size, count = results["image_size"], results["num_images"]
    table = Table(title=f"bits/dim on {count} test images of {results['dataset']} {size}x{size}", min_width=60)
    table.add_column("part")
    for column in ("this model", "histogram", "uniform"):
        table.add_column(column, justify="right")
    for stage, part in results["stages"].items():
        table.add_row(stage, *(f"{part[key]:.3f}" for key in ("bits_per_dim", "histogram", "uniform")))
    table.add_section()
    total = results["total"]
    table.add_row("total", *(f"{total[key]:.3f}" for key in ("bits_per_dim", "histogram", "uniform")))
    if results["generated_bits"] == 8:
        table.caption = f"raw entropy {results['raw_entropy']:.3f}, PNG {results['png']:.3f}"
    return table
