"""The user's own images: found, decoded and checked before anything starts; then completed, upscaled or scored.

What a use takes follows from the config alone. Images of another size are cropped and resized as the dataset's were, or
with image_fit=exact refused, with what the model takes.
`sample.py` with images=... runs the node sample_images, `evaluate.py` the node score_images.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import posixpath
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.csv

from data_prep import images, parquet
from data_prep.config import DataConfig
from data_prep.files import FileEntry, Store, UserError, open_store, printable
from pipelines.config import (
    SAMPLE_IMAGES,
    SCORE_IMAGES,
    EvaluateNodeConfig,
    ExperimentConfig,
    SampleNodeConfig,
    UserImages,
    stage_model_config,
    stage_names,
    train_node,
)
from pipelines.dag.node import NodeContext, NodeResult, Picture
from pipelines.nodes.evaluate import ScoringJob
from pipelines.nodes.evaluate import score as score_chunks
from pipelines.nodes.pictures import UNKNOWN, animation, depth_after, display, generation_frames, png, side_by_side
from pipelines.nodes.sample import ANIMATION, Chunk, Job, counts, draw, read_chunks, record
from pipelines.nodes.trained import load_stage_configs
from spn.config import SPNConfig

FOLDER, RECORD, GRID, CSV = "user_images", "record.json", "grid.png", "scores.csv"
NUM_SHOWN = 16  # images in the grid, with all their draws
MOST_NAMED = 3  # images that cannot be used; the rest is counted
MOST_NAME_BYTES = 200  # of 255, with the folders: those of its draws are longer
NOT_RGB = {  # conversions that a dataset would flag, and that nobody should find in an exact result
    "bit_depth_16": "has 16 bits per channel",
    "gray_to_rgb": "is grayscale",
    "palette": "has palette colours",
    "alpha_dropped": "has an alpha channel",
    "cmyk": "is in CMYK",
}


# ---- nodes ------------------------------------------------------------------------------------------------------


def sample(context: NodeContext[SampleNodeConfig]) -> NodeResult:
    """sample_images: upscales images in size or depth, or completes them, several draws each.

    Draws depend on the seed, on an image's values and on the number of the draw, not on the other images.
    """
    config = context.config
    user, num_draws = _given(config), config.num_draws
    store = open_store(context.out).sub(FOLDER)
    to_draw = Chunk(
        keys=tuple(f"{key}-{number:02d}" for key in user.keys for number in range(num_draws)),
        seeds=tuple(f"{digest}/{number}" for digest in user.digests.values() for number in range(num_draws)),
        given=user.values.repeat(num_draws, axis=0),
    )
    chunks = draw(Job(config, context.inputs, store.uri), to_draw, progress=context.progress)
    configs = load_stage_configs(context.inputs, config.stages)
    values = read_chunks(store, configs, chunks, most=NUM_SHOWN * num_draws)
    given_bits = _given_bits(config, configs[config.stages[0]])
    drawn = display(values, num_bits=depth_after(configs[config.stages[-1]]))
    columns = [drawn[number::num_draws] for number in range(num_draws)]
    picture = side_by_side([_shown(config, given_bits)[:NUM_SHOWN], *columns])
    store.write_bytes(GRID, png(picture))
    frames = generation_frames(values[0], list(configs.values()), given_bits=given_bits)
    store.write_bytes(ANIMATION, animation(frames))
    store.write_text(RECORD, json.dumps({**record(context, chunks), "images": user.digests}, indent=1))
    shown = [Picture(f"{FOLDER}/{GRID}", f"user_images/{config.use}")]
    return NodeResult(outputs={"images": FOLDER}, metrics=counts(chunks), pictures=shown)


def score(context: NodeContext[EvaluateNodeConfig]) -> NodeResult:
    """score_images: exact bits/dim of images, of each part of the chain and in total."""
    config, user = context.config, _given(context.config)
    read = functools.partial(_read_images, user.keys, user.values << (8 - user.num_bits))
    job = ScoringJob(config, context.inputs, context.out, read)
    table = score_chunks(job, len(user.keys), progress=context.progress).table()
    store = open_store(context.out).sub(FOLDER)
    with store.writing([CSV]) as streams:
        pyarrow.csv.write_csv(table.set_column(0, "key", pa.array(map(csv_text, user.keys))), streams[CSV])
    networks = {stage: context.inputs[train_node(stage)].attempt for stage in config.stages}
    how = {"use": "scores", "stages": config.stages, "bits": user.num_bits, "batch_size": config.batch_size}
    store.write_text(RECORD, json.dumps({**how, "networks": networks, "images": user.digests}, indent=1))
    scores = table.drop_columns("key").to_pydict()
    metrics = {f"user_images/bits_per_dim/{part}": sum(bits) / len(bits) for part, bits in scores.items()}
    with context.run.open() as run:
        run.log_metrics(metrics)
    return NodeResult(outputs={"scores": FOLDER}, metrics=metrics)


def _given(config: SampleNodeConfig | EvaluateNodeConfig) -> UserImages:
    assert config.images is not None
    return config.images


def _read_images(keys: Sequence[str], images: np.ndarray, rows: range) -> tuple[list[str], np.ndarray]:
    return list(keys[rows.start : rows.stop]), images[rows.start : rows.stop]


def csv_text(name: str) -> str:
    """A name for a table that spreadsheets open: on one line, and no formula."""
    return ("'" if name.startswith(("=", "+", "-", "@")) else "") + printable(name)


def _given_bits(drawing: SampleNodeConfig, network: SPNConfig) -> np.ndarray:
    """[H, W]: how many bits of each pixel of an image were given."""
    size, factor, depth = network.image_size, network.scaling_factor, _given(drawing).num_bits
    bits = np.zeros((size, size), np.int64)
    if drawing.use == "depth_upscale":
        bits[:] = depth
    elif network.stage == "baseline":
        bits[: drawing.num_given] = depth
    else:
        for number in range(drawing.num_given or 1):
            bits[number // factor :: factor, number % factor :: factor] = depth
    return bits


def _shown(drawing: SampleNodeConfig, given_bits: np.ndarray) -> np.ndarray:
    """The given images, gray where nothing was given."""
    user = _given(drawing)
    pictures = display(user.values, num_bits=user.num_bits)
    if drawing.use == "complete":
        pictures = np.where((given_bits > 0)[None, :, :, None], pictures, np.uint8(UNKNOWN))
    return pictures


# ---- what fits --------------------------------------------------------------------------------------------------


def for_sampling(config: ExperimentConfig) -> UserImages:
    """Images to start from, for sample.use. Raises UserError for what the chain cannot start from."""
    use, stages = config.sample.use, stage_names(config)
    if use is None:
        raise UserError("images is set, but sample.use is not; sample.use=size_upscale, depth_upscale or complete")
    if use != "complete" and config.sample.num_given is not None:
        raise UserError(f"sample.num_given is for sample.use=complete; {use} takes the whole image as given")
    if use != "complete" and use not in config.stages:
        raise UserError(f"sample.use is {use}, but config {config.name} has no stage {use}; it has {config.stages}")
    size, bits = config.data.image_size, config.bits[0]
    side, what = size, f"sample.use={use} takes {size}x{size} images"
    if use == "size_upscale":
        side, stages = size // config.scaling_factor, [s for s in stages if s != "first_slice"]
        what = f"sample.use=size_upscale takes {side}x{side} images: slice (0, 0) of {size}x{size}"
    elif use == "depth_upscale":
        if config.image_bits not in (8, None):
            bits = config.image_bits
        if bits not in config.bits[:-1]:
            depths = " or ".join(str(b) for b in (*config.bits[:-1], 8))
            raise UserError(f"image_bits is {config.image_bits}; this chain upscales images of {depths} bits")
        later = [stage_model_config(config, stage) for stage in stages]
        stages = [model.stage for model in later if model.num_given_bits >= bits]
    else:
        given = config.sample.num_given
        most, parts = (size - 1, "rows") if "baseline" in stages else (config.scaling_factor**2 - 1, "slices")
        if not 1 <= (given or 0) <= most:  # only a beginning of the order of generation has an exact conditional
            allowed = f"the first 1 to {most} {parts} of an image can be given"
            raise UserError(f"sample.num_given is {given or 'not set'}; {allowed}")
        stages = [s for s in stages if s != "first_slice"]
    _check_bits(config.image_bits, bits)
    keys, values, num_fitted = _read(config, side=side, what=what, bits=bits)
    return UserImages(SAMPLE_IMAGES, _names(keys), values, bits, tuple(stages), num_fitted)


def for_scoring(config: ExperimentConfig) -> UserImages:
    """Images to score. Raises UserError for images that do not fit the model, and for settings of sampling."""
    for key, value in config.sample.set_for_images().items():
        raise UserError(f"sample.{key} is {value}; it is for sample.py: evaluate.py scores images as they are")
    size, bits, stages = config.data.image_size, config.bits[-1], stage_names(config)
    _check_bits(config.image_bits, bits)
    keys, values, num_fitted = _read(config, side=size, what=f"the model takes {size}x{size} images", bits=bits)
    return UserImages(SCORE_IMAGES, keys, values, bits, tuple(stages), num_fitted)


def _check_bits(image_bits: int | None, bits: int) -> None:
    if image_bits not in (8, bits, None):
        takes = "8 bits" if bits == 8 else f"{bits} bits, or of 8 to be reduced"
        raise UserError(f"image_bits is {image_bits}; the model takes images of {takes}")


def _read(config: ExperimentConfig, *, side: int, what: str, bits: int) -> tuple[tuple[str, ...], np.ndarray, int]:
    """Names below the folder, values of `bits` bits, uint8 [N, side, side, 3], and how many images were fitted."""
    takes = f"{what}, 8-bit RGB"
    is_exact = config.image_fit == "exact" or (config.image_bits or 8) < 8
    data_config, keys, values, num_fitted, wrong = config.data, [], [], 0, list[str]()
    for name, data in _files(config.images or ""):
        try:
            decoded = images.decode(
                data, profile=data_config.decode_profile, exif=data_config.exif or "apply", strict_jpeg=True
            )
        except images.UnusableImage as error:
            wrong.append(f"{name} cannot be read ({error.message})")
            continue
        pixels, (height, width) = decoded.pixels, decoded.pixels.shape[:2]
        is_fitted, smallest = (height, width) != (side, side), min(data_config.min_side, data_config.image_size)
        if is_exact and (texts := [text for key, text in NOT_RGB.items() if key in decoded.conversions]):
            wrong.append(f"{name} {texts[0]}")
        elif is_exact and is_fitted:
            wrong.append(f"{name} is {width}x{height}")
        elif is_fitted and min(height, width) < smallest:
            wrong.append(f"{name} is {width}x{height}, and data.min_side={data_config.min_side} forbids to enlarge it")
        else:
            if is_fitted:
                pixels, num_fitted = _fitted(pixels, data_config, side=side), num_fitted + 1
            keys.append(name)
            values.append(_to_depth(name, pixels, stored=config.image_bits, bits=bits))
    if wrong:
        more = f"; and {len(wrong) - MOST_NAMED} more" if len(wrong) > MOST_NAMED else ""
        raise UserError(f"images: {'; '.join(wrong[:MOST_NAMED])}{more}; {takes}")
    return tuple(keys), np.stack(values), num_fitted


def _fitted(pixels: np.ndarray, data: DataConfig, *, side: int) -> np.ndarray:
    """Cropped and resized as the dataset's images were, and of that the first slice if only that is wanted.

    Where the dataset has many squares of a photo (tiles, random), this is the central one, as large as it can be.
    """
    square = pixels if data.crop == "squash" else images.center_crop(pixels)
    whole = images.resize_squares(square, [data.image_size], profile=data.round_profile)[data.image_size]
    return whole[:: data.image_size // side, :: data.image_size // side]


def _to_depth(name: str, pixels: np.ndarray, *, stored: int | None, bits: int) -> np.ndarray:
    """stored: bits of the pixels' values; None: not said, so 8, but values that all fit into `bits` are asked about."""
    largest = int(pixels.max())
    if stored is not None and stored < 8:
        if largest >= 2**stored:
            raise UserError(
                f"images: {name} holds a value of {largest}; image_bits={stored} means 0 to {2**stored - 1}, "
                "image_bits=8 means 0 to 255, of which the high bits are taken"
            )
        return pixels
    if stored is None and bits < 8 and 0 < largest < 2**bits:
        raise UserError(
            f"images: {name} holds no value above {largest}; if its values are of {bits} bits, say image_bits={bits}; "
            "if it is so dark an image of 8 bits, image_bits=8"
        )
    return parquet.low_depth(pixels, bits)


def _names(keys: tuple[str, ...]) -> tuple[str, ...]:
    """What the drawn images are called: the file's name without its suffix, folders joined by "_"."""
    names: dict[str, str] = {}
    for key in keys:
        name = posixpath.splitext(key)[0].replace("/", "_")
        if len(name.encode()) > MOST_NAME_BYTES:
            raise UserError(f"images: {key} has a name of more than {MOST_NAME_BYTES} bytes; rename it")
        if name in names:
            raise UserError(f"images: {names[name]} and {key} would both be called {name}; rename one")
        names[name] = key
    return tuple(names)


def _files(where: str) -> Iterator[tuple[str, bytes]]:
    """(name, content) of a file, of all images below a folder, or of what a pattern such as photos/*.png matches."""
    try:
        store = open_store(where)
        entry = store.info("")
        if entry is not None and not entry.is_folder:
            yield posixpath.basename(store.base), store.read_bytes("")
            return
        if entry is not None:
            if problem := store.bad_link():
                raise UserError(f"images: {problem}")
            found = [file for file in store.walk() if images.is_image_name(file.path)]
        else:
            store, found = _matching(where)
        found = [file for file in found if not images.is_hidden(file.path)]
        if not found:
            wanted = f"no image ({', '.join(images.IMAGE_SUFFIXES[:6])}) is below"
            looked_for = "nothing is at" if entry is None else wanted
            raise UserError(f"images: {looked_for} {where}")
        for file in found:
            yield file.path, store.read_bytes(file.path)
    except OSError as error:
        raise UserError(f"images: cannot read {where}: {error.strerror or error}") from error


def _matching(pattern: str) -> tuple[Store, list[FileEntry]]:
    """The last folder without a wildcard, and the files that the parts after it match, part by part; a part that is
    itself a name there is no pattern."""
    is_uri = "://" in pattern
    path, mark, options = pattern.partition("?") if is_uri and not pattern.startswith("file:") else (pattern, "", "")
    parts, wild = path.split("/"), "*[" if is_uri else "*?["  # "?" begins a URI's options
    first = next((n for n, part in enumerate(parts) if any(sign in part for sign in wild)), len(parts) - 1)
    store = open_store(("/".join(parts[:first]) or ("/" if path.startswith("/") else ".")) + mark + options)
    folders, fits = [""], []
    for part in parts[first:]:
        there = [(posixpath.basename(entry.path), entry) for folder in folders for entry in store.list(folder)]
        fits = [e for name, e in there if name == part] or [e for name, e in there if fnmatch.fnmatchcase(name, part)]
        folders = [entry.path for entry in fits if entry.is_folder]
    return store, [entry for entry in fits if not entry.is_folder]
