"""sample: images drawn through the whole chain, with what each stage made of them side by side."""

from __future__ import annotations

import json

from data_prep import files as storage
from pipelines.dag.node import NodeContext, NodeResult
from pipelines.nodes.drawing import Job, chunk_size, chunks_of, draw, read_chunks
from pipelines.nodes.pictures import after_stages, animation, generation_frames, grid, png, side_by_side
from pipelines.nodes.trained import checkpoint_step, load_stage_configs

FOLDER, CHAIN, ANIMATION, RECORD = "samples", "chain.png", "generation.webp", "samples.json"
NUM_SHOWN = 64  # images in the grids


def run(context: NodeContext) -> NodeResult:
    """config: stages (in chain order), num_images, batch_size (None: what fits), seed, precision, temperature, top_p
    {stage: value}.

    options: resources.
    """
    config, stages = context.config, context.config["stages"]
    store = storage.open_store(context.out).sub(FOLDER)
    keys = [f"{index:05d}" for index in range(config["num_images"])]
    configs, resources = load_stage_configs(context.inputs, stages), context.options["resources"]
    size = chunk_size(config["batch_size"], num_images=len(keys), store=store, resources=resources)
    chunks = chunks_of(keys, range(config["num_images"]), size=size)
    job = Job(
        inputs=context.inputs,
        stages=stages,
        seed=config["seed"],
        temperature=config["temperature"],
        top_p=config["top_p"],
        precision=config["precision"],
        out=store.uri,
        num_chunks=len(chunks),
    )
    draw(job, chunks, resources=resources, progress=context.progress)
    values = read_chunks(store, configs, num_chunks=len(chunks), most=NUM_SHOWN)
    pictures = after_stages(values, configs)
    grids = {stage: grid(images) for stage, images in pictures.items()}
    chain = side_by_side(list(pictures.values()))
    for stage, picture in grids.items():
        store.write_bytes(f"{stage}.png", png(picture))
    store.write_bytes(CHAIN, png(chain))
    store.write_bytes(ANIMATION, animation(generation_frames(values[0], list(configs.values()))))
    networks = {stage: context.inputs[f"train_{stage}"].attempt for stage in stages}
    store.write_text(RECORD, json.dumps({**config, "batch_size": size, "networks": networks}, indent=1))
    with context.run.open() as run:
        for stage, picture in grids.items():
            run.log_image(picture, key=f"samples/{stage}")
        run.log_image(chain, key="samples/chain")
    for stage, picture in grids.items():  # under one key, so that the stages' grids lie side by side in the UI
        output = context.inputs[f"train_{stage}"]
        with context.run.at(output.mlflow_run_id).open() as run:
            run.log_image(picture, key="samples", step=checkpoint_step(output))
    return NodeResult(
        outputs={"samples": FOLDER},
        metrics={"images/sampled": float(config["num_images"]), "images/batch_size": float(size)},
    )
