"""Commands that run no node: --status, --gc and --export of a run folder, --verify of a dataset, --compare,
--list-sources, and describe.py."""

from __future__ import annotations

import contextlib
import json
import textwrap
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from data_prep.files import Store, UserError, join, open_store, parent, printable
from data_prep.lock import Lock
from data_prep.parquet import open_dataset
from data_prep.verify import counts, verify
from pipelines import pipeline, tracking
from pipelines.config import ExperimentConfig, stage_model_config, stage_names, train_node
from pipelines.dag import status
from pipelines.dag.attempts import history
from pipelines.dag.masking import mask_uris
from pipelines.dag.progress import Display, Update
from pipelines.nodes import registry
from pipelines.start import MARKER, accessing, check_run_folder, locked, plan_of, removed_if_interrupted, run_folder

DONE, DAMAGED = 0, 1
# What GPU-hours rest on: the share of the card's FLOP/s (spn.gpu.flops) that training and scoring reach. Measured on
# the presets' networks: training 0.59 to 0.62, celebahq256's 0.49 (benchmarks/results/train/); scoring 0.63 and 0.51
# (benchmarks/results/evaluate/). Validation, checkpoints and waiting for data come out of the rest.
GPU, MFU = "H100", 0.5
CARD = """\
---
library_name: subscale-pixel-networks
pipeline_tag: unconditional-image-generation
tags: [subscale-pixel-networks, autoregressive, exact-likelihood]
license: unknown
---
# {name}: images of {image_size}×{image_size} pixels

A chain of Subscale Pixel Networks (Menick & Kalchbrenner, ICLR 2019), one network per stage, trained on {dataset}.
Exact bits/dim on its {num_images} test images, in dims of the full image, so that the stages add up:

| stage | bits/dim | standard error |
| --- | --- | --- |
{rows}

Each stage has its configuration and averaged weights (safetensors). To draw four images and score them:

```python
from spn.checkpoint import load_chain
from spn.evaluation import bits_per_dim, chain_nats
from spn.sampling import sample_chain

models = load_chain(".")  # this folder: {{stage: network}}
images = sample_chain(models, seed=0, images=range(4))["{last}"]  # integers of {generated_bits} bits
nats = sum(chain_nats(models, {at_8_bits}).values())  # exact, per image
print(bits_per_dim(float(nats.sum()), num_images=4, image_size={image_size}))
```
"""


def show_status(config: ExperimentConfig) -> int:
    """Prints what the run folder holds of every node. Needs neither Ray nor MLflow."""
    store = run_folder(config)
    with accessing(store):
        table = status.lines(plan_of(config, store))
    print("\n".join([f"run folder: {store.uri}", *table]))
    return DONE


def collect_garbage(config: ExperimentConfig, *, delete: bool) -> int:
    """Lists attempts that this config's plan does not refer to, and deletes them if asked to.

    Raises UserError when they are to be deleted while a start uses the run folder.
    """
    store = run_folder(config)
    with locked(Lock(store)) if delete and store.list("nodes") else contextlib.nullcontext():
        with accessing(store):
            plan = plan_of(config, store)
            if found := status.find_garbage(plan):  # else there is no need to ask MLflow
                found = status.find_garbage(plan, named=_attempts_in_use(config, store))
        sizes = [sum(file.bytes for file in store.walk(each.folder)) for each in found]
        print(f"run folder: {store.uri}")
        for a, size in zip(found, sizes, strict=True):
            print(f"{a.node}  {a.fingerprint}/{a.attempt}  {a.state}, {a.age}  {size:,} bytes")
        if delete:
            status.delete(store, found)
    what = f"{len(found)} attempt{'' if len(found) == 1 else 's'}, {sum(sizes):,} bytes"
    print(f"deleted: {what}" if delete else f"to be deleted by --gc --yes: {what}")
    return DONE


def _attempts_in_use(config: ExperimentConfig, store: Store) -> set[str]:
    """Attempts whose model version has an alias. Raises UserError for another MLflow than the last launch had."""
    own, made = mask_uris(str(config.tracking.uri)), check_run_folder(store, name=config.name)
    if (made_with := str((made.get("tracking") or {}).get("uri"))) != own:
        what = f"the last launch had tracking.uri={made_with}, this command has {own}"
        raise UserError(f"--gc: {what}: only that MLflow knows which models are in use")
    uri = tracking.default_uri(store, name=config.name, configured=config.tracking.uri)
    return registry.attempts_with_alias(uri, experiment=config.name)


def export(config: ExperimentConfig, where: str) -> int:
    """Copies the config's trained networks to a new folder and adds a model card, as the Hugging Face Hub expects it.

    `spn.checkpoint.load_chain` reads the folder, `train.init_from` the folders of its stages. Raises UserError.
    """
    store, target, stages = run_folder(config), open_store(where), stage_names(config)
    if target.info() is not None:
        raise UserError(f"--export: {where} exists; remove it or choose another name")
    plan = plan_of(config, store, "evaluate")
    if (evaluated := plan["evaluate"].success) is None:
        raise UserError(f"--export: evaluate has no finished output ({plan['evaluate'].reason}); run it first")
    if evaluated.adopted:
        raise UserError("--export: evaluate was kept by --keep, so its scores may be those of others; --rerun evaluate")
    results = json.loads(open_store(evaluated.output(store).place("results")).read_bytes(""))
    scores = {**results["stages"], "total": results["total"]}
    rows = [f"| {name} | {part['bits_per_dim']:.3f} | {part['standard_error']:.3f} |" for name, part in scores.items()]
    at_8_bits = f"images << {8 - results['generated_bits']}".removesuffix(" << 0")
    fields = {"name": config.name, "last": stages[-1], "rows": "\n".join(rows), "at_8_bits": at_8_bits, **results}
    with removed_if_interrupted(target):
        for stage in stages:
            trained = plan[train_node(stage)].success
            assert trained is not None, "evaluate has read it"
            checkpoint = open_store(trained.output(store).place("checkpoint"))
            for name in pipeline.CHECKPOINT:
                target.write_bytes(join(stage, name), checkpoint.read_bytes(name))
        target.write_text("README.md", CARD.format(**fields))
    print(f"exported: {target.uri}")
    return DONE


def verify_dataset(uri: str) -> int:
    """Checks every file, count and pixel of the dataset at a path or URI. Raises UserError where there is none."""
    try:
        manifest = open_dataset(uri).manifest
        with contextlib.closing(Display()) as display:
            problems = verify(uri, progress=lambda done, total: display.show({"verify": Update(done, total, "images")}))
    except (OSError, ValueError) as error:
        raise UserError(f"--verify {uri}: {error}") from error
    if problems:
        print("\n".join(map(printable, problems)))
        print(f"damaged: {uri} (problems: {len(problems)}; to build it anew: --rerun prepare_data)")
        return DAMAGED
    print("\n".join(counts(manifest)))
    print(f"intact: {uri} ({len(manifest.shards)} files, {sum(shard.bytes for shard in manifest.shards)} bytes)")
    return DONE


def dataset_of(config: ExperimentConfig) -> str:
    """URI of the dataset that the config's nodes would read now. Raises UserError when it is not built."""
    store, node = run_folder(config), "prepare_data"
    decision = plan_of(config, store, node)[node]
    if decision.success is None:
        raise UserError(f"--verify: config {config.name} has no finished dataset ({decision.reason}); build it first")
    return decision.success.output(store).place("dataset")


def compare(places: Sequence[str]) -> int:
    """Prints how two runs differ in bits/dim, image by image, for each part in which both score the same values.

    places: of two run folders or files per_image.parquet; paths or URIs. The difference is paired: what makes an image
    easy or hard for both falls away, so it is known far better than either mean. Raises UserError.
    """
    (first, of_first), (second, of_second) = map(_per_image, places)
    if first.column("key") != second.column("key"):
        raise UserError(f"--compare: {places[0]} and {places[1]} score different images")
    table = Table(title=f"bits/dim of {len(first)} images", caption=escape(f"A: {places[0]}\nB: {places[1]}"))
    others = dict[str, str]()  # parts in which they score other bits, slices or pixels
    for column in ("part", "A", "B", "A - B", "standard error"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for part in (name for name in first.column_names[1:] if name in second.column_names):
        if part in of_first and part in of_second and of_first[part] != of_second[part]:
            others[part] = f"{of_first[part]}, B {of_second[part]}"
            continue
        means = (f"{pc.mean(scores.column(part)).as_py():.4f}" for scores in (first, second))
        difference, error = registry.paired_difference(first, second, part)
        table.add_row(part, *means, f"{difference:+.4f}", f"{error:.4f}")
    Console().print(table)
    for part, values in others.items():
        print(f"{part} is not compared: it scores other bits, slices or pixels, A {values}")
    return DONE


def _per_image(place: str) -> tuple[pa.Table, dict[str, str]]:
    """Scores of a file, or of a run folder's newest `evaluate`; and what each part scores, if results.json lies there:
    the size and entropy of the images, and the bits/dim of a uniform distribution, which say how many bits of how many
    slices."""
    try:
        if not parent(place)[1].endswith(".parquet"):
            store = open_store(place)
            made = [attempt.success for attempt in history(store, "evaluate") if attempt.success is not None]
            if not made:
                what = "no finished evaluate in this run folder" if store.exists(MARKER) else "no run folder"
                raise UserError(f"--compare {place}: {what}")
            place = max(made, key=lambda success: success.finished).output(store).place("per_image")
        scores, beside = registry.read_scores(place), open_store(parent(place)[0])
        if not beside.exists("results.json"):
            return scores, {}
        results = json.loads(beside.read_bytes("results.json"))
        size, parts = results["image_size"], {**results["stages"], "total": results["total"]}
        pixels = f"{size}x{size} pixels with a raw entropy of {results['raw_entropy']:.4f}"
        return scores, {part: f"{found['uniform']:g} bits/dim of {pixels}" for part, found in parts.items()}
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"--compare {mask_uris(place)}: {error}") from error


def list_sources() -> int:
    from data_prep.sources import describe  # imports the readers of all formats

    for name, layout, count in describe():
        print(f"data.source={name}")
        print(textwrap.indent(textwrap.fill(layout, 96, break_on_hyphens=False), "    "))
        print(f"    expected: {count}\n")
    print("data.source=auto (the default) recognises them by the names of their files.")
    return DONE


# ---- describe.py -----------------------------------------------------------------------------------------------------


def describe(config: ExperimentConfig) -> dict[str, Any]:
    """{"stages": {stage: its description}, "gpu_hours": to train all stages, "scoring_gpu_hours": to score 1,000 images
    with all slices of all stages}."""
    stages = {stage: describe_stage(config, stage) for stage in stage_names(config)}
    slices = {stage: 1 if stage == "first_slice" else config.scaling_factor**2 for stage in stages}
    return {
        "stages": stages,
        "gpu_hours": sum(found["gpu_hours"] for found in stages.values()),
        "scoring_gpu_hours": _gpu_hours(1000 * sum(stages[s]["flops_per_slice"] * slices[s] for s in stages)),
    }


def describe_stage(config: ExperimentConfig, stage: str) -> dict[str, Any]:
    """Of one network, which is built on torch's meta device: it has shapes but no memory. FLOPs are dense: masked
    weights and masked attention count as if they were not."""
    import torch

    from spn.gpu.flops import forward_flops
    from spn.model import SPN, parameter_counts

    network, train = stage_model_config(config, stage), config.per_stage[stage].train
    with torch.device("meta"):
        counts = parameter_counts(SPN(network))
    forward, _ = forward_flops(network)
    training_flops = 3 * forward * train.batch_size * train.num_steps  # the backward pass costs two forward passes
    return {
        "parameters": counts,
        "flops_per_slice": forward,
        "batch_size": train.batch_size,
        "num_workers": config.resources.per_node[train_node(stage)].num_workers,
        "num_steps": train.num_steps,
        "training_flops": training_flops,
        "gpu_hours": _gpu_hours(training_flops),
    }


def _gpu_hours(flops: float) -> float:
    from spn.gpu.flops import PEAK_FLOPS  # torch

    return flops / (MFU * PEAK_FLOPS[GPU]) / 3600


def _amount(value: float) -> str:
    return f"{value:,.2f}" if value >= 1 else f"{value:.2g}"


def described(description: dict[str, Any]) -> str:
    from spn.gpu.flops import PEAK_FLOPS  # torch

    lines = []
    for stage, found in description["stages"].items():
        counts, workers, gflops = found["parameters"], found["num_workers"], _amount(found["flops_per_slice"] / 1e9)
        lines += [
            f"{stage}: {counts['total']:,} parameters",
            *(f"  {part:<34}{count:>14,}" for part, count in counts.items() if part != "total"),
            f"  {gflops} GFLOPs per slice forward, three times that in training (dense)",
            f"  batch of {found['batch_size']:,} slices on {workers} worker{'s' if workers > 1 else ''}",
            f"  {found['num_steps']:,} steps: {found['training_flops']:.2e} FLOPs, "
            f"{_amount(found['gpu_hours'])} GPU-hours",
            "",
        ]
    lines += [
        f"scoring 1,000 images: about {_amount(60 * description['scoring_gpu_hours'])} GPU-minutes",
        f"all stages: about {_amount(description['gpu_hours'])} GPU-hours of an {GPU}, if training and scoring in "
        f"bfloat16 reach {MFU:.0%} of {PEAK_FLOPS[GPU] / 1e12:.0f} TFLOP/s (assumed)",
    ]
    return "\n".join(lines)
