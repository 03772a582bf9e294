"""The nearest training image of each sample, in pixels: are samples copies of what was trained on?

    python benchmarks/nearest.py --samples RUN/nodes/sample/.../images --dataset RUN/nodes/prepare_data/.../dataset \\
        --out FOLDER

Distance: root mean square difference of all values (0 to 255) to every training image of the same size, upright and
mirrored. Writes nearest.png, each sample with its nearest training image to the right of it, and nearest.json. Test
images, which were never trained on, are measured in the same way: a copy would lie much nearer than they do.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from data_prep.parquet import Dataset, open_dataset, pixels
from pipelines.nodes.pictures import grid


@dataclass(frozen=True)
class Nearest:
    key: str  # of the training image
    mirrored: bool  # whether it is its mirror image that is so near
    distance: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--samples", type=Path, required=True, help="folder of images")
    parser.add_argument("--dataset", required=True, help="dataset that prepare_data made: path or URI")
    parser.add_argument("--test", type=int, default=100, help="test images to measure for comparison")
    parser.add_argument("--columns", type=int, default=4, help="pairs per row of the picture")
    parser.add_argument("--out", type=Path, required=True, help="folder for nearest.png and nearest.json")
    arguments = parser.parse_args()
    files = sorted(arguments.samples.glob("*.png"))
    samples = np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files])
    dataset = open_dataset(arguments.dataset)
    size = samples.shape[1]
    test = pixels(pa.concat_tables(dataset.tables(resolution=size, bits=8, split="test", rows=range(arguments.test))))
    found, images = nearest(np.concatenate([samples, test]), dataset)
    rows = [{"sample": file.name, **asdict(one)} for file, one in zip(files, found, strict=False)]
    ours, held_out = ([one.distance for one in part] for part in (found[: len(files)], found[len(files) :]))
    result = {"samples": summary(ours), "test_images": summary(held_out), "nearest": rows}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "nearest.json").write_text(json.dumps(result, indent=1) + "\n")
    pairs = np.concatenate([samples, images[: len(files)]], axis=2)
    Image.fromarray(grid(pairs, columns=arguments.columns)).save(arguments.out / "nearest.png")
    print(json.dumps({name: result[name] for name in ("samples", "test_images")}, indent=1))


def nearest(images: np.ndarray, dataset: Dataset) -> tuple[list[Nearest], np.ndarray]:
    """Of each of uint8 [B, H, W, 3], its nearest training image, and these as pixels, mirrored where that is nearer."""
    num, size = images.shape[:2]
    queries = _flat(np.concatenate([images, images[:, :, ::-1]]))
    best = np.full(2 * num, np.inf)
    keys, pictures = [""] * (2 * num), np.zeros((2 * num, *images.shape[1:]), np.uint8)
    for table in dataset.tables(resolution=size, bits=8, split="train", columns=["key", "px"]):
        names, candidates = table.column("key").to_pylist(), pixels(table)
        others = _flat(candidates)
        squares = _norms(queries)[:, None] - 2 * (queries @ others.T).astype(np.float64) + _norms(others)
        for query, index in enumerate(squares.argmin(axis=1)):
            if squares[query, index] < best[query]:
                best[query], keys[query], pictures[query] = squares[query, index], names[index], candidates[index]
    mirrored = best[num:] < best[:num]
    chosen = np.arange(num) + num * mirrored
    upright = np.where(mirrored[:, None, None, None], pictures[chosen][:, :, ::-1], pictures[chosen])
    # The search is by products in float32; what is reported is measured on the pixels themselves.
    exact = np.sqrt(((images.astype(np.float64) - upright) ** 2).mean(axis=(1, 2, 3)))
    found = [Nearest(keys[c], bool(m), float(d)) for c, m, d in zip(chosen, mirrored, exact, strict=True)]
    return found, upright


def _flat(images: np.ndarray) -> np.ndarray:
    """float32 [B, values], around zero, so that products stay exact enough."""
    return images.reshape(len(images), -1).astype(np.float32) - 127.5


def _norms(flat: np.ndarray) -> np.ndarray:
    return np.einsum("bi,bi->b", flat, flat, dtype=np.float64)


def summary(distances: list[float]) -> dict[str, float]:
    return {"num": len(distances), "least": min(distances), "median": float(np.median(distances))}


if __name__ == "__main__":
    main()
