"""The data set's own README.md: what a person needs to know before using or citing it."""

from __future__ import annotations

from data_prep.config import SPLITS
from data_prep.parquet import Manifest

_PROFILES = {
    "tf": "JPEG by the fast integer DCT, area resize, truncation to uint8: equal to TensorFlow's default operations",
    "accurate": "JPEG by the accurate DCT, area resize, rounding to the nearest uint8",
}
_CROPS = {
    "center": "central square of each photo",
    "squash": "the whole photo, squashed into a square",
    "random": "a square at a random place along the longer side of each photo",
}


def text(manifest: Manifest) -> str:
    config = manifest.config
    crop = _CROPS.get(config["crop"], "")
    if config["crop"] == "tiles":
        stride = config["tile_stride"] or config["tile_size"]
        crop = f"tiles of {config['tile_size']} pixels, every {stride} pixels in train, without overlap elsewhere"
    licence = "The images keep the licences of their source."
    if manifest.source["built_in"]:
        licence = "Authors and licences of the photos: data_prep/demo_photos/ATTRIBUTION.md. Some are CC BY 4.0."
    rows = "\n".join(
        f"| {split} | {manifest.num_photos[split]} | {count} | `{manifest.split_hashes[split][:16]}` |"
        for split, count in manifest.num_images.items()
    )
    return f"""# {manifest.dataset}

RGB images as Parquet, one folder for each resolution ({_numbers(config["resolutions"])}) and bit depth
({_numbers(config["bits"])}). Depth b holds the b most significant bits of each 8-bit value.

| split | photos | images | sha256 of the sorted keys, first 16 digits |
| --- | --- | --- | --- |
{rows}

- Source: `{manifest.source["name"]}`. Crop: {crop}. Splits ({config["split"]}) are by photo: none is in two of them.
- Pixels: {_PROFILES[config["profile"]]}{_deviations(config)}.
- Conversions, in images: {_counts(manifest.conversions)}.
- Photos that could not be used (`quarantine.parquet`): {_counts(manifest.quarantine)}.
- Files of the source that are not images: {_counts(manifest.source["skipped"])}.
- Columns: `key` (path in the source), `label` (null where unknown), `orig_h`, `orig_w` (of the whole photo), `flags`
  (one bit for each conversion), `px` (height x width x 3 bytes, row by row). Rows are in the same order everywhere.
- `manifest.json` lists every file with its checksum; files that it does not list do not belong to the dataset.
- Plan `{manifest.plan_hash}`, {", ".join(f"{name} {version}" for name, version in manifest.versions.items())}.
- {licence}
"""


def _deviations(config: dict) -> str:
    """What the configuration changes of its profile."""
    names = [f"{name} {config[name]}" for name in ("dct", "rounding") if config[name] is not None]
    if config["exif"] == "apply":
        names.append("EXIF orientation applied")
    return f"; but {', '.join(names)}" if names else ""


def counts(manifest: Manifest) -> list[str]:
    """The same for a terminal: source, images by split, conversions, quarantine, skipped files."""
    found = manifest.num_images
    images = ", ".join(f"{found[split]} {split}" for split in SPLITS if split in found)
    lines = [f"source: {manifest.source['name']} ({manifest.source['recognised_by']})"]
    lines += [f"dataset {manifest.dataset}: {sum(manifest.num_images.values())} images ({images})"]
    kinds = {"converted": manifest.conversions, "quarantined": manifest.quarantine}
    kinds["skipped"] = manifest.source["skipped"]
    for what, found in kinds.items():
        lines.append(f"{what}: {sum(found.values())}" + (f" ({_counts(found)})" if found else ""))
    return lines


def _numbers(values: list[int]) -> str:
    return ", ".join(map(str, values))


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
