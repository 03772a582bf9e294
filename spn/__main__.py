"""Trains a tiny SPN on crops of one photo and draws pictures with it, in half a minute on a CPU.

    python -m spn PHOTO [--steps 300] [--out spn.png]

The shortest way through the whole method: crops of a photo are cut into slices (spn/ordering.py), the network learns
each slice given those before it (spn/model.py), and draws pixel by pixel, slice by slice (spn/sampling.py).
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from spn.bitdepth import reduce_depth, to_display
from spn.config import DecoderConfig, EmbedderConfig, SPNConfig, TrainConfig
from spn.evaluation import bits_per_dim, image_nats
from spn.model import SPN
from spn.sampling import sample_chain
from spn.training import Batch, TrainState, bits_per_dim_estimate, train_step

WIDTHS = dict(conv_channels=32, residual_channels=72, num_attn_layers=2, num_attn_heads=4, attn_head_dim=16)
NETWORK = SPNConfig(
    stage="size_upscale",
    image_size=32,
    scaling_factor=4,  # 16 slices of 8 x 8 pixels
    num_bits=3,
    decoder=DecoderConfig(num_layers=3, num_memory_rows=128, recipe="modern", **WIDTHS),
    embedder=EmbedderConfig(num_conv_layers=2, num_memory_rows=128, recipe="modern", **WIDTHS),
)


def crops(photo: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """[number, 3, 32, 32] at random places of photo [3, H, W]."""
    size = NETWORK.image_size
    rows, columns = (torch.randint(length - size + 1, (number,), generator=generator) for length in photo.shape[1:])
    places = zip(rows.tolist(), columns.tolist(), strict=True)
    return torch.stack([photo[:, row : row + size, column : column + size] for row, column in places])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m spn", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("photo", type=Path)
    parser.add_argument("--steps", type=int, default=300, help="of training (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("spn.png"), help="the picture (default: %(default)s)")
    options = parser.parse_args(arguments)

    try:
        image = Image.open(options.photo).convert("RGB").resize((144, 96), Image.Resampling.BOX)
    except (OSError, Image.DecompressionBombError) as error:
        why = getattr(error, "strerror", None) or error
        parser.exit(2, f"error: {options.photo} is no picture that can be read: {why}\n")
    if options.steps < 1:
        parser.exit(2, f"error: --steps is {options.steps}; it must be at least 1\n")
    try:
        Image.new("RGB", (1, 1)).save(
            io.BytesIO(), Image.registered_extensions().get(options.out.suffix.lower(), "none")
        )
    except (KeyError, OSError):
        parser.exit(2, f"error: --out is {options.out}; its name must end as a picture's does, such as .png\n")
    if not options.out.absolute().parent.is_dir():
        parser.exit(2, f"error: --out is {options.out}; there is no folder {options.out.parent}\n")
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).long()  # [3, 96, 144]
    values = reduce_depth(pixels, from_bits=8, to_bits=NETWORK.num_bits)
    learned, held_out = values[:, :, :108], values[:, :, 108:]  # the right quarter is for measuring

    config = TrainConfig(
        num_steps=options.steps,
        batch_size=16,
        optimizer="adamw",
        learning_rate=3e-3,
        schedule="cosine",
        warmup_steps=20,
        polyak_decay=0.98,
    )
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    state = TrainState.create(SPN(NETWORK), config)
    model = state.model
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {options.steps} steps of 16 slices")
    recent = []
    for step in range(1, options.steps + 1):
        index = torch.randint(NETWORK.num_slices, (16,), generator=generator)
        batch = Batch(crops(learned, 16, generator), index, None, ["crop"] * 16)
        recent.append(float(train_step(state, [batch], config=config, forward=model)[0]))
        if step % 20 == 0:
            bits = bits_per_dim_estimate(sum(recent[-20:]), num_images=20 * 16, config=NETWORK)
            print(f"step {step:4} of {options.steps}: train/bits_per_dim {bits:.3f}", flush=True)
    test = crops(held_out, 32, torch.Generator().manual_seed(1))
    nats = image_nats(state.ema, test, None, slices=range(NETWORK.num_slices))
    bits = bits_per_dim(float(nats.sum()), num_images=len(test), image_size=NETWORK.image_size)
    print(f"valid/bits_per_dim {bits:.3f}, a uniform guess has {NETWORK.num_bits}", flush=True)
    print("drawing 12 pictures of 32 x 32", flush=True)
    drawn = sample_chain({"size_upscale": state.ema}, seed=0, images=range(12))["size_upscale"]
    rows = torch.cat([crops(learned, 4, generator), drawn]).unflatten(0, (4, 4))  # [4 rows, 4 columns, 3, 32, 32]
    sheet = to_display(rows.permute(0, 3, 1, 4, 2).flatten(0, 1).flatten(1, 2), num_bits=NETWORK.num_bits)
    Image.fromarray(sheet.numpy().astype(np.uint8)).resize((512, 512), Image.Resampling.NEAREST).save(options.out)
    print(f"{options.out.resolve()}: crops of the photo in the top row, below them what the network drew")


if __name__ == "__main__":
    main()
