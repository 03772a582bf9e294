"""sample_images: the user's own images upscaled in size or depth, or completed, several draws each."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from data_prep import files as storage
from pipelines.dag.node import NodeContext, NodeResult
from pipelines.nodes.drawing import Job, chunk_size, chunks_of, draw, read_chunks
from pipelines.nodes.pictures import UNKNOWN, animation, display, generation_frames, png, side_by_side
from pipelines.nodes.trained import load_stage_configs
from spn.config import SPNConfig

if TYPE_CHECKING:
    from pipelines.nodes.own_images import OwnImages

FOLDER, GRID, ANIMATION, RECORD = "own_images", "grid.png", "generation.webp", "record.json"
NUM_SHOWN = 16  # images in the grid, with all their draws


def run(context: NodeContext) -> NodeResult:
    """config: use, num_given, given_bits, stages (to be run), num_draws, batch_size, seed, precision, temperature,
    top_p.

    options: resources, images (OwnImages). Draws depend on the seed, an image's values and the number of the draw, not
    on what else is given beside it.
    """
    config = context.config
    own: OwnImages = context.options["images"]
    stages, num_draws, num_given = config["stages"], config["num_draws"], config["num_given"]
    store = storage.open_store(context.out).sub(FOLDER)
    keys = [f"{key}-{number:02d}" for key in own.keys for number in range(num_draws)]
    seeds = [f"{digest}/{number}" for digest in own.digests for number in range(num_draws)]
    configs, resources = load_stage_configs(context.inputs, stages), context.options["resources"]
    size = chunk_size(config["batch_size"], num_images=len(keys), store=store, resources=resources)
    chunks = chunks_of(keys, seeds, size=size, given=own.values.repeat(num_draws, axis=0))
    job = Job(
        inputs=context.inputs,
        stages=stages,
        seed=config["seed"],
        temperature=config["temperature"],
        top_p=config["top_p"],
        precision=config["precision"],
        out=store.uri,
        num_chunks=len(chunks),
        use=config["use"],
        num_given=num_given,
    )
    draw(job, chunks, resources=resources, progress=context.progress)
    most = NUM_SHOWN * num_draws
    values = read_chunks(store, configs, num_chunks=len(chunks), most=most)
    last = configs[stages[-1]]
    given_bits = _given_bits(own, configs[stages[0]])
    drawn = display(values, num_bits=last.num_given_bits + last.num_bits)
    draws = [drawn[number::num_draws] for number in range(num_draws)]
    picture = side_by_side([_shown(own, given_bits)[:NUM_SHOWN], *draws])
    store.write_bytes(GRID, png(picture))
    frames = generation_frames(values[0], list(configs.values()), given_bits=given_bits)
    store.write_bytes(ANIMATION, animation(frames))
    images = dict(zip(own.keys, own.digests, strict=True))
    record = {**config, "batch_size": size, "images": images, "networks": _networks(context)}
    store.write_text(RECORD, json.dumps(record, indent=1))
    with context.run.open() as run:
        run.log_image(picture, key=f"own_images/{config['use']}")
    return NodeResult(
        outputs={"images": FOLDER}, metrics={"images/sampled": float(len(keys)), "images/batch_size": float(size)}
    )


def _given_bits(own: OwnImages, config: SPNConfig) -> np.ndarray:
    """[H, W]: how many bits of each pixel of an image were given."""
    size, factor = config.image_size, config.scaling_factor
    bits = np.zeros((size, size), np.int64)
    if own.use == "depth_upscale":
        bits[:] = own.num_bits
    elif own.use == "size_upscale":
        bits[::factor, ::factor] = own.num_bits
    elif config.stage == "baseline":
        bits[: own.num_given] = own.num_bits
    else:
        for number in range(own.num_given):
            bits[number // factor :: factor, number % factor :: factor] = own.num_bits
    return bits


def _shown(own: OwnImages, given_bits: np.ndarray) -> np.ndarray:
    """The given images, gray where nothing was given."""
    pictures = display(own.values, num_bits=own.num_bits)
    if own.use == "complete":
        pictures = np.where((given_bits > 0)[None, :, :, None], pictures, np.uint8(UNKNOWN))
    return pictures


def _networks(context: NodeContext) -> dict[str, str]:
    """{stage: attempt that trained its network}."""
    return {stage: context.inputs[f"train_{stage}"].attempt for stage in context.config["stages"]}
