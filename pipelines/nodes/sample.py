"""sample: images drawn through the whole chain, with what each stage made of them side by side."""

from __future__ import annotations

import io

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pipelines import storage
from pipelines.node import NodeContext, NodeResult
from pipelines.trained import checkpoint_step, load_stages, pick_device
from spn.bitdepth import to_display
from spn.model import SPN
from spn.sampling import rows_to_sample, sample_chain

FOLDER, CHAIN = "samples", "chain.png"
MARGIN = 2  # pixels between images of a grid


def run(context: NodeContext) -> NodeResult:
    """config: stages (in chain order), num_images, batch_size, seed, temperature {stage: t}. options: num_threads."""
    torch.set_num_threads(context.options["num_threads"])
    config, stages = context.config, context.config["stages"]
    models = load_stages(context.inputs, stages, device=pick_device())
    num_images, batch_size = config["num_images"], config["batch_size"]
    size = models[stages[0]].config.slice_size
    pixels_a_row, rows = size, rows_to_sample(models)
    done, total = 0, -(-num_images // batch_size) * rows * pixels_a_row

    def on_row() -> None:
        nonlocal done
        done += pixels_a_row
        context.progress.update(done, total, unit="pixel steps", note=f"batch of {min(batch_size, num_images)}")

    drawn: dict[str, list[Tensor]] = {stage: [] for stage in stages}
    # Chunks of a fixed size, recorded in the config: the result does not depend on the machine's memory.
    for start in range(0, num_images, batch_size):
        known = sample_chain(
            models,
            seed=config["seed"],
            images=range(start, min(start + batch_size, num_images)),
            temperature=config["temperature"],
            on_row=on_row,
        )
        for stage, values in known.items():
            drawn[stage].append(values.cpu())
    pictures = {stage: _to_pixels(torch.cat(drawn[stage]), models[stage]) for stage in stages}
    store = storage.open_store(context.out).sub(FOLDER)
    for stage, images in pictures.items():
        store.write_bytes(f"{stage}.png", _png(grid(images, columns=_columns(num_images))))
    store.write_bytes(CHAIN, _png(side_by_side(list(pictures.values()))))
    for index, image in enumerate(pictures[stages[-1]]):
        store.write_bytes(f"images/{index:05d}.png", _png(image))
    with context.run.open() as run:
        for stage, images in pictures.items():
            run.log_image(grid(images, columns=_columns(num_images)), key=f"samples/{stage}")
        run.log_image(side_by_side(list(pictures.values())), key="samples/chain")
    for stage, images in pictures.items():  # under one key, so that the stages' grids lie side by side in the UI
        output = context.inputs[f"train_{stage}"]
        with context.run.at(output.mlflow_run_id).open() as run:
            run.log_image(grid(images, columns=_columns(num_images)), key="samples", step=checkpoint_step(output))
    return NodeResult(outputs={"samples": FOLDER}, metrics={"images/sampled": float(num_images)})


def _to_pixels(values: Tensor, model: SPN) -> np.ndarray:
    """Values [N, 3, h, w] of a stage's depth -> uint8 [N, h, w, 3], spread over the whole range for the eye."""
    depth = model.config.num_given_bits + model.config.num_bits
    return to_display(values, num_bits=depth).permute(0, 2, 3, 1).to(torch.uint8).numpy()


def _columns(num_images: int) -> int:
    return max(1, round(num_images**0.5 + 0.49))


def grid(images: np.ndarray, *, columns: int) -> np.ndarray:
    """uint8 [N, h, w, 3] -> one picture with a white margin between images, row after row."""
    num, height, width, _ = images.shape
    rows = -(-num // columns)
    canvas = np.full((rows * (height + MARGIN) - MARGIN, columns * (width + MARGIN) - MARGIN, 3), 255, np.uint8)
    for i, image in enumerate(images):
        top, left = (i // columns) * (height + MARGIN), (i % columns) * (width + MARGIN)
        canvas[top : top + height, left : left + width] = image
    return canvas


def side_by_side(stages: list[np.ndarray]) -> np.ndarray:
    """One row for each image: what it was after each stage, small slices enlarged by repeating pixels."""
    height = max(images.shape[1] for images in stages)
    columns = [images.repeat(height // images.shape[1], 1).repeat(height // images.shape[1], 2) for images in stages]
    ordered = np.stack(columns, axis=1).reshape(-1, height, height, 3)
    return grid(ordered, columns=len(stages))


def _png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG")
    return buffer.getvalue()
