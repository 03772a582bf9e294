"""Lossless compression of test images by a chain that is trained as in the race: bits/dim on disk, images/s.

    python pipelines/prepare_data.py --config cifar10 data.root=FOLDER storage=RUNS
    python benchmarks/compress.py --dataset RUNS/cifar10/nodes/prepare_data/*/*/dataset --variant modern --seconds 480 \
        --batch 256 16 1 --out benchmarks/results/compress

For each number of images that are coded at once, the first --images test images (at most --rounds batches of them) go
into one file as pipelines/compress.py writes it, are decoded from it and compared. `bits_per_dim_on_disk` counts every
byte of that file, `bits_per_dim_likelihood` is what the networks say of the same images. Sampling as many images at the
same width is timed beside it, without a coder. The first batch of each is not timed.

`formats`: PNG, WebP and, if pillow-jxl-plugin is installed, JPEG-XL at their best effort, a file for each of the first
500 images.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.machine import report
from benchmarks.race import score, train_chain, variants
from pipelines.compression import Header, pack, unpack
from spn.config import PRECISIONS
from spn.decoding import coding
from spn.model import SPN
from spn.sampling import sample_chain

FORMATS: dict[str, dict[str, Any]] = {
    "png": dict(format="PNG", optimize=True),
    "webp": dict(format="WEBP", lossless=True, quality=100, method=6),
    "jpeg_xl": dict(format="JXL", lossless=True, effort=9),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dataset", required=True, help="Parquet dataset of 8 bits at one resolution")
    parser.add_argument("--variant", required=True, choices=variants(32))
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--batch", type=int, nargs="+", default=[256, 16, 1], help="images coded at once")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=40, help="batches at most")
    parser.add_argument("--precision", choices=PRECISIONS, default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    arguments = parser.parse_args()
    from data_prep.parquet import open_dataset, pixels

    dataset = open_dataset(arguments.dataset)
    name, size = dataset.manifest.config["dataset"], max(dataset.manifest.config["resolutions"])
    train, test = (pixels(dataset.read(resolution=size, bits=8, split=split)) for split in ("train", "test"))
    variant, seconds = variants(size)[arguments.variant], arguments.seconds
    models = {}
    for state, _ in train_chain(train, variant, seconds=seconds, device=arguments.device):
        model = SPN(state.ema.config).to(arguments.device).eval()  # in its plain form, as the pipeline loads it
        model.load_state_dict(state.ema.state_dict())
        models[model.config.stage] = model
    what = {"data": f"{name} {size}x{size}", "variant": arguments.variant, "seconds": seconds}
    what["formats"] = sizes_of_formats(test[:500])
    for batch in arguments.batch:
        images = test[: min(arguments.images, arguments.rounds * batch)]
        result = {**what, **measure(models, images, batch=batch, precision=arguments.precision)}
        report(result, arguments.out, f"{name}-{arguments.variant}-{seconds:g}s-b{batch}")


def measure(models: Mapping[str, SPN], images: np.ndarray, *, batch: int, precision: str) -> dict[str, Any]:
    """Codes images [N, H, W, 3] (uint8, 8 bits) into one file and decodes it. Raises ValueError if that fails."""
    device = next(next(iter(models.values())).parameters()).device
    own = precision if device.type == "cuda" else "float32"  # a CPU knows no other
    numerics = coding.numerics(device.type, precision=precision)
    pixels = torch.from_numpy(images.copy()).permute(0, 3, 1, 2)
    options: dict[str, Any] = dict(precision=precision, decoders={})
    header = Header(
        stages=dict.fromkeys(models, "0" * 16),
        numerics=numerics,
        batch_size=batch,
        image_size=images.shape[1],
        names=[f"{number:05d}.png" for number in range(len(images))],
        git_commit="0" * 40,
        lengths=[0] * len(images),
    )

    def encode(part: torch.Tensor) -> list[bytes]:
        return list(coding.encode(models, part.to(device), batch=batch, **options))

    def decode(part: Sequence[bytes]) -> list[torch.Tensor | None]:
        return list(coding.decode(models, part, batch=batch, **options))

    def sample(starts: Iterable[int]) -> None:
        for start in starts:
            drawn = sample_chain(models, seed=0, images=range(start, start + batch), decoder=coding.DECODER, **options)
            list(drawn.values())[-1].cpu()

    first = encode(pixels[:batch])
    streams, encode_sec = _timed(encode, pixels)
    data = pack(header, streams)
    decode(first)
    found, decode_sec = _timed(decode, unpack(data, name="the file")[1])
    if not all(own is not None and torch.equal(own, image) for own, image in zip(found, pixels, strict=True)):
        raise ValueError("not every image comes back")
    sample(range(1))
    _, sample_sec = _timed(sample, range(0, len(images), batch))
    return {
        **numerics,
        "batch": batch,
        "num_images": len(images),
        "bits_per_dim_on_disk": 8 * len(data) / images.size,
        "bits_per_dim_header": 8 * (len(data) - sum(map(len, streams))) / images.size,
        "bits_per_dim_likelihood": float(score(models, images, precision=own)["total"].mean(dtype=np.float64)),
        "images_per_sec_encode": len(images) / encode_sec,
        "images_per_sec_decode": len(images) / decode_sec,
        "decode_time_over_sampling": decode_sec / sample_sec,
    }


def _timed(call: Callable[[Any], Any], argument: Any) -> tuple[Any, float]:
    """What the call returns, and its seconds; it ends with results on the CPU."""
    began = time.perf_counter()
    return call(argument), time.perf_counter() - began


def sizes_of_formats(images: np.ndarray) -> dict[str, float]:
    """{format: bits/dim of images [N, H, W, 3], a file for each}, of the formats that Pillow can write here."""
    with contextlib.suppress(ImportError):
        importlib.import_module("pillow_jxl")
    Image.init()
    return {
        name: 8 * sum(_num_bytes(image, options) for image in images) / images.size
        for name, options in FORMATS.items()
        if options["format"] in Image.SAVE
    }


def _num_bytes(image: np.ndarray, options: Mapping[str, Any]) -> int:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, **options)
    return buffer.tell()


if __name__ == "__main__":
    main()
