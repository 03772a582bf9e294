"""report: one self-contained HTML page of a run (pictures inside the file, nothing loaded from elsewhere)."""

from __future__ import annotations

import base64
import io
import json
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")  # no display on a cluster

from matplotlib.figure import Figure  # noqa: E402

from data_prep.files import open_store
from data_prep.parquet import Manifest, open_dataset
from pipelines.config import ReportNodeConfig
from pipelines.dag.masking import mask_uris
from pipelines.dag.node import NodeContext, NodeResult

if TYPE_CHECKING:  # the page does not depend on how results are computed
    from pipelines.nodes.evaluate import Part, Results

PAGE = "report.html"
STYLE = """
body{font:16px/1.5 system-ui,sans-serif;color:#1c2733;max-width:1080px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.7rem;margin-bottom:.2rem}h2{font-size:1.2rem;margin-top:2.4rem;border-bottom:1px solid #d9e0e7}
table{border-collapse:collapse;margin:.8rem 0}th,td{padding:.3rem .9rem}
th,td{text-align:right;border-bottom:1px solid #e6ebf0}
th:first-child,td:first-child{text-align:left}tr.total td{font-weight:600;border-top:2px solid #1c2733}
.muted{color:#607080}.best{font-weight:600;color:#0b6b3a}
.grids{display:flex;flex-wrap:wrap;gap:1.2rem}figure{margin:0}figcaption{color:#607080;font-size:.9rem}
img.pixels{image-rendering:pixelated;max-width:100%}img{max-width:100%}
pre{background:#f4f6f8;padding:1rem;overflow-x:auto;font-size:.85rem}
"""


def run(context: NodeContext[ReportNodeConfig]) -> NodeResult:
    """Reads what every other node left."""
    config = context.config
    stages = config.stages
    results: Results = json.loads(_read(context, "evaluate", "results"))
    histories = {stage: json.loads(_read(context, f"train_{stage}", "history")) for stage in stages}
    manifest = open_dataset(context.inputs["prepare_data"].place("dataset")).manifest
    store = open_store(context.inputs["sample"].place("samples"))
    pictures = {stage: store.read_bytes(f"{stage}.png") for stage in stages}
    title = f"{escape(config.name)}: {', '.join(stages)}"
    page = "".join(
        [
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
            f"<style>{STYLE}</style></head><body><h1>{title}</h1>",
            "<p class=muted>Subscale Pixel Networks, each stage a network of its own</p>",
            _bits_section(results, stages),
            _samples_section(pictures, store.read_bytes("chain.png"), store.read_bytes("generation.webp"), stages),
            _curves_section(histories),
            _data_section(manifest),
            _rerun_section(context, stages),
            f"<h2>Configuration</h2><pre>{escape(mask_uris(config.yaml))}</pre></body></html>\n",
        ]
    )
    open_store(context.out).write_text(PAGE, page)
    with context.run.open() as run:
        run.log_text(page, PAGE)
    return NodeResult(outputs={"report": PAGE}, metrics={})


def _read(context: NodeContext[ReportNodeConfig], node: str, name: str) -> bytes:
    return open_store(context.inputs[node].place(name)).read_bytes("")


def _bits_section(results: Results, stages: Sequence[str]) -> str:
    rows = "".join(_row(escape(stage), results["stages"][stage]) for stage in stages)
    rows += _row("total", results["total"], css=" class=total")
    bits, size = results["generated_bits"], results["image_size"]
    notes = [
        f"Exact, on all {results['num_images']} test images of {escape(results['dataset'])} ({size} × {size}, {bits} "
        "bits): nats of every dim summed and divided once by the dims of the full image, so the parts add up. The "
        "standard error is over images."
    ]
    for found, how in (
        (results.get("in_float32"), "in float32"),
        (results.get("with_raw_weights"), "with raw instead of averaged weights"),
    ):
        if found is not None:
            change = f"{found['difference']:+.4f} ± {found['standard_error']:.4f}"
            notes.append(f"Scored {how}, the first {found['num_images']} images differ by {change} bits/dim.")
    if bits == 8:
        notes.append(
            f"For comparison: raw entropy of these test images (an ideal code of each channel's values) "
            f"{results['raw_entropy']:.3f}, as PNG files {results['png']:.3f} bits/dim."
        )
    return (
        "<h2>Bits/dim</h2><table><tr><th>part<th>this model<th>standard error<th>histogram<th>uniform</tr>"
        f"{rows}</table><p>{'<p>'.join(notes)}<p class=muted>histogram: each channel's values drawn independently, as "
        "often as among training pixels.</p>"
    )


def _row(label: str, part: Part, css: str = "") -> str:
    best = " class=best" if part["bits_per_dim"] < part["histogram"] else ""
    rest = "".join(f"<td>{part[key]:.3f}" for key in ("standard_error", "histogram", "uniform"))
    return f"<tr{css}><td>{label}<td{best}>{part['bits_per_dim']:.3f}{rest}</tr>"


def _samples_section(pictures: Mapping[str, bytes], chain: bytes, film: bytes, stages: Sequence[str]) -> str:
    grids = "".join(
        f"<figure>{_image(data)}<figcaption>{escape(stage)}</figcaption></figure>" for stage, data in pictures.items()
    )
    order = " → ".join(escape(stage) for stage in stages)
    return (
        f"<h2>Samples</h2><div class=grids>{grids}</div><p>One image per row, after each stage ({order}):</p>"
        f"{_image(chain)}<p>The first of them in its order of generation, slice after slice, then depth:</p>"
        f'<img class=pixels src="{_inline(film, kind="webp")}">'
    )


def _image(png: bytes) -> str:
    width = int.from_bytes(png[16:20], "big") * 2  # twice the PNG header's
    return f'<img class=pixels width={width} src="{_inline(png)}">'


def _inline(picture: bytes, *, kind: str = "png") -> str:
    return f"data:image/{kind};base64," + base64.b64encode(picture).decode()


def _curves_section(histories: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    figure = Figure(figsize=(max(10, 3.4 * len(histories)), 3.4), layout="constrained")
    axes = figure.subplots(1, len(histories), squeeze=False)[0]
    for axis, (stage, history) in zip(axes, histories.items(), strict=True):
        compared = "valid/bits_per_dim/all_slices"  # of the dims of train; earlier trainings have one score alone
        valid = compared if compared in history[-1] else "valid/bits_per_dim"
        for metric, style in (("train/bits_per_dim", {"alpha": 0.5, "lw": 1}), (valid, {"marker": "o"})):
            points = [(entry["images_seen"], entry[metric]) for entry in history if metric in entry]
            axis.plot(*zip(*points, strict=True), label=metric.split("/")[0], ms=3, **style)
        axis.set(title=stage, xlabel="images seen")
        axis.grid(alpha=0.3)
        axis.legend()
    axes[0].set_ylabel("bits/dim")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return (
        f'<h2>Learning curves</h2><img src="{_inline(buffer.getvalue())}"><p class=muted>Bits/dim of the stage’s own '
        "part; train: estimate from one random slice per image; valid: exact, Polyak-averaged weights, over all slices "
        "that the network trains on, which after a first_slice include slice (0, 0), unlike the table above.</p>"
    )


def _data_section(manifest: Manifest) -> str:
    counts = ", ".join(f"{count} {split}" for split, count in manifest.num_images.items())
    bad = sum(manifest.quarantine.values())
    reasons = ", ".join(f"{escape(reason)} {count}" for reason, count in manifest.quarantine.items())
    aside = f"{bad} set aside ({reasons}), listed in quarantine.parquet." if bad else "No photo had to be set aside."
    return f"<h2>Data</h2><p>{escape(manifest.dataset)}: {counts} images. {aside}</p>"


def _rerun_section(context: NodeContext[ReportNodeConfig], stages: Sequence[str]) -> str:
    folder = context.out.rsplit("/", 4)[0]  # the run folder: out is <it>/nodes/report/<fingerprint>/<attempt>
    file = "FILE.yaml" if "://" in folder else shlex.quote(f"{folder}/config.yaml")
    command = f"python pipelines/full_multidim.py --config {escape(context.config.preset or file)}"
    rerun, run, rows, curves = f"--rerun train_{escape(stages[-1])}", context.run, "", ""
    settings = "<p class=muted>With the key=value settings of this launch, if it had any.</p>"
    note = settings if context.config.preset else ""  # the run folder's own file has them
    for node, output in context.inputs.items():
        shown = escape(output.mlflow_run_id or "–")
        if output.mlflow_run_id and run.run_id:  # a launch that records nothing does not know the UI's address
            shown = f'<a href="{escape(run.link(output.mlflow_run_id))}">{shown}</a>'
        rows += f"<tr><td>{escape(node)}<td>{escape(output.attempt)}<td>{shown}</tr>"
    if run.run_id:
        link = f'<a href="{escape(run.links()["curves"])}">The curves of the stages in MLflow</a>'
        curves = f"<p>{link} <span class=muted>(while its UI runs)</span></p>"
    return (
        f"<h2>Rerun</h2><pre>{command} {'':{len(rerun)}}   # skips what is up to date\n"
        f"{command} {rerun}   # that node, then what reads its new output\n"
        f"{command} {'--dry-run':{len(rerun)}}   # what would run, and why</pre>"
        f"{note}<table><tr><th>node<th>attempt<th>MLflow run</tr>{rows}</table>{curves}"
    )
