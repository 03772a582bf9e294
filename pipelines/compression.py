"""Images through all stages of a trained chain into one file, and back bit for bit (spn/decoding/coding.py).

    MAGIC      its last byte is the format's version
    8 bytes    length and CRC-32 of the header, little-endian
    header     the fields of `Header` as JSON, compressed by LZMA

Streams follow, one for each image in the order of the header's names; each ends at a checksum of its image.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import lzma
import posixpath
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from data_prep.files import Store, UserError, open_store, printable
from data_prep.parquet import low_depth, open_dataset
from pipelines import cluster, pipeline
from pipelines.config import ExperimentConfig, stage_names, train_node
from pipelines.dag import attempts
from pipelines.dag.attempts import Success
from pipelines.dag.progress import Display, Update
from pipelines.nodes import images
from pipelines.nodes.evaluate import read_test
from pipelines.nodes.memory import naming_full_memory
from pipelines.nodes.pictures import png
from pipelines.nodes.sample import ON_CPU
from pipelines.nodes.trained import load_stages
from pipelines.start import accessing, plan_of, run_folder
from spn.config import PRECISIONS
from spn.decoding import coding
from spn.model import SPN
from spn.sampling import rows_to_sample

MAGIC = b"SPNC\x01"
MOST_HEADER, WIDEST = 2**28, 8192  # bytes, decompressed; images at once
ON_GPU = 256  # images at once unless sample.batch_size says so; on a CPU as many as are drawn


@dataclass(frozen=True)
class Header:
    """Raises UserError for names that lead out of a folder, and for numbers that would fill the memory."""

    stages: dict[str, str]  # in order of generation: digest of each network's configuration and weights
    numerics: dict[str, str]  # spn.decoding.coding.numerics
    batch_size: int  # images coded at once
    image_size: int
    names: list[str]  # relative paths
    git_commit: str  # of the code that made it
    lengths: list[int]  # of the streams, in bytes

    def __post_init__(self) -> None:
        for name in self.names:
            if name != posixpath.normpath(name) or name.startswith(("/", "..")) or "\0" in name:
                raise UserError(f"{name!r} is not the name of a file in a folder")
        if len({*self.names}) < len(self.names):
            raise UserError("two images have the same name")
        fits = len(self.names) == len(self.lengths) and 1 <= self.batch_size <= min(len(self.names), WIDEST)
        if not fits or min(self.lengths) < 0 or self.numerics["precision"] not in PRECISIONS:
            raise UserError("batch_size, lengths or precision of a compressed file are out of range")


def pack(header: Header, streams: Sequence[bytes]) -> bytes:
    fields = asdict(replace(header, lengths=[len(stream) for stream in streams]))
    text = lzma.compress(json.dumps(fields, separators=(",", ":")).encode())
    return b"".join([MAGIC, struct.pack("<II", len(text), zlib.crc32(text)), text, *streams])


def unpack(data: bytes, *, name: str) -> tuple[Header, list[bytes]]:
    """The header, and the stream of each image, cut short where the file is. Raises UserError."""
    start = len(MAGIC) + 8
    if data[: len(MAGIC)] != MAGIC or len(data) < start:
        raise UserError(f"{name} is not a file that compress.py of this version wrote")
    length, checksum = struct.unpack("<II", data[start - 8 : start])
    text = data[start : start + length]
    try:
        if zlib.crc32(text) != checksum:
            raise ValueError("checksum")
        header = Header(**json.loads(lzma.LZMADecompressor(memlimit=MOST_HEADER).decompress(text, MOST_HEADER)))
    except (ValueError, TypeError, KeyError, AttributeError, lzma.LZMAError) as error:
        raise UserError(f"{name}: its header is damaged ({error}), so nothing in it can be decoded") from error
    ends = itertools.accumulate(header.lengths, initial=start + length)
    return header, [data[first:end] for first, end in itertools.pairwise(ends)]


@contextlib.contextmanager
def _shown(what: str, header: Header, models: Mapping[str, SPN]) -> Iterator[dict[str, Any]]:
    """How images are coded; progress is shown in rows of pixels of a batch."""
    rows, done = rows_to_sample([model.config for model in models.values()]), itertools.count(1)
    total = rows * -(-len(header.names) // header.batch_size)
    with contextlib.closing(Display()) as display:
        options: dict[str, Any] = dict(batch=header.batch_size, precision=header.numerics["precision"], decoders={})
        yield {**options, "on_row": lambda: display.show({what: Update(next(done), total, "rows")})}


def compress(config: ExperimentConfig, target: Store, *, check: bool) -> int:
    """Codes the user's images or, without any, the test split. Raises UserError for what is missing or does not fit."""
    store = run_folder(config)
    with accessing(store):  # sample.py needs the same networks
        plan = plan_of(config, store, "sample")
    made = {decision.node.name: decision.success for decision in plan.decisions if decision.success}
    networks = {stage: made[train_node(stage)] for stage in stage_names(config)}
    keys, values = _images(config, made["prepare_data"], store)
    resources = config.resources.per_node["sample"]
    models, on_gpu = _loaded(networks, store, resources.device), resources.use_gpu
    header = Header(
        stages={stage: attempts.content(network, pipeline.WEIGHTS) for stage, network in networks.items()},
        numerics=coding.numerics(resources.device, precision=config.sample.precision if on_gpu else "float32"),
        batch_size=min(len(keys), config.sample.batch_size or (ON_GPU if on_gpu else ON_CPU)),
        image_size=config.data.image_size,
        names=[key if key.lower().endswith(".png") else f"{key}.png" for key in keys],
        git_commit=cluster.git_commit(),
        lengths=[0] * len(keys),
    )
    pixels = torch.from_numpy(values.copy()).permute(0, 3, 1, 2)
    with naming_full_memory("sample.batch_size", header.batch_size), _shown("compress", header, models) as options:
        data = pack(header, list(coding.encode(models, pixels.to(resources.device), **options)))
    with accessing(target, what="write to"):
        target.write_bytes("", data)
    if check:
        with _shown("check", header, models) as options:
            _, streams = unpack(target.read_bytes(""), name=target.uri)
            found = zip(header.names, coding.decode(models, streams, **options), pixels, strict=True)
            wrong = [name for name, image, own in found if image is None or not torch.equal(image, own)]
        if wrong:
            target.delete()
            raise UserError(f"{len(wrong)} images, {wrong[0]} first, do not come back; {target.uri} was deleted")
    size = f"{len(keys)} images in {len(data):,} bytes, {8 * len(data) / values.size:.4f} bits/dim"
    print(f"{target.uri}: {size}, {'decoded again bit for bit' if check else 'not checked'}")
    return 0


def decompress(config: ExperimentConfig, file: str, target: Store) -> int:
    """Writes what can be decoded. Raises UserError for another machine or network, and if something is damaged."""
    source = open_store(file)
    with accessing(source, what="read"):
        header, streams = unpack(source.read_bytes(""), name=file)
    device = "cuda" if header.numerics.get("device") == "cuda" and torch.cuda.is_available() else "cpu"
    here = coding.numerics(device, precision=header.numerics["precision"])
    if here != header.numerics:
        other = [f"{key} {own} (here {here.get(key)})" for key, own in header.numerics.items() if here.get(key) != own]
        raise UserError(f"{file} can be decoded only with what coded it: {', '.join(other)}")
    store = run_folder(config)
    with accessing(store):
        past = [attempt for stage in header.stages for attempt in attempts.history(store, train_node(stage))]
        known = {attempts.content(own, pipeline.WEIGHTS): own for own in attempts.intact(store, past)}
    networks = {stage: known[digest] for stage, digest in header.stages.items() if digest in known}
    if lost := [stage for stage in header.stages if stage not in networks]:
        what = f"{file} was coded by other networks than {store.uri} has ({', '.join(lost)})"
        raise UserError(f"{what}; --config and name=... or storage=... say whose networks decode it")
    models, num_whole = _loaded(networks, store, device), 0
    with _shown("decompress", header, models) as options, accessing(target, what="write to"):
        for name, image in zip(header.names, coding.decode(models, streams, **options), strict=True):
            if image is None:
                print(f"damaged: {printable(name)}")
            else:
                target.write_bytes(name, png(image.permute(1, 2, 0).numpy()))
                num_whole += 1
    print(f"{num_whole} of {len(header.names)} images are in {target.uri}")
    if num_whole < len(header.names):
        raise UserError(f"{file} is damaged, or was coded by other code (git commit {header.git_commit})")
    return 0


def _images(config: ExperimentConfig, data: Success, store: Store) -> tuple[Sequence[str], np.ndarray]:
    """Names, and values of the chain's depth."""
    bits = config.bits[-1]
    if config.images is not None:
        if bits < 8 and config.image_bits != bits:
            raise UserError(f"image_bits is {config.image_bits}; this chain codes {bits} bits: image_bits={bits}")
        user = images.for_scoring(replace(config, image_fit="exact"))
        return user.keys, user.values
    uri = data.output(store).place("dataset")
    num_test = open_dataset(uri).num_images("test")
    if not num_test:
        raise UserError(f"split=test: {uri} has no test images")
    keys, values = read_test(uri, config.data.image_size, range(num_test))
    return [posixpath.normpath(key) for key in keys], low_depth(values, bits)  # a tar's members may be ./00000.png


def _loaded(networks: Mapping[str, Success], store: Store, device: str) -> dict[str, SPN]:
    if device == "cpu":
        torch.set_num_threads(1)  # sums are the same on any number of CPUs
    elif not torch.cuda.is_available():
        raise UserError("resources.use_gpu is true, but there is no GPU here")
    outputs = {train_node(stage): network.output(store) for stage, network in networks.items()}
    return load_stages(outputs, list(networks), device=device)
