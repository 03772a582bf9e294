"""Pixels equal TensorFlow's bit for bit; odd images are converted or named.

pytest tests/data_prep/images/test_images.py
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import pathlib
import re
import struct
import sys
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from data_prep import images, parquet
from data_prep.resize import resize_area
from tests.data_prep.made import damaged_jpeg, encoded

# What TensorFlow itself made of inputs that a formula gives. Sizes are chosen so that another order of the sums, or a
# fused multiply-add, changes some value.
TENSORFLOW_AREA = json.loads((pathlib.Path(__file__).parent / "tensorflow_area.json").read_text())


def formula_image(height: int, width: int) -> np.ndarray:
    y, x, c = np.meshgrid(np.arange(height), np.arange(width), np.arange(3), indexing="ij")
    return ((7 * y + 13 * x + 29 * c + (y * x) % 251) % 256).astype(np.uint8)


def sha256(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


@pytest.mark.parametrize("case", TENSORFLOW_AREA["resized"], ids=lambda case: "{}x{}-{}x{}".format(*case))
def test_area_resize_equals_tensorflow(case: list) -> None:
    height, width, out_height, out_width, as_float, as_uint8 = case
    resized = resize_area(formula_image(height, width), [(out_height, out_width)])[0]
    assert resized.dtype == np.float32
    assert sha256(resized) == as_float
    assert sha256(images.to_uint8(resized, profile="tf")) == as_uint8


@pytest.mark.parametrize("case", TENSORFLOW_AREA["flat"], ids=lambda case: "{}-{}-{}".format(*case))
def test_flat_areas_lose_a_level_where_they_do_in_tensorflow(case: list) -> None:
    """The float32 reciprocal of the area makes 254.99998 of some flat 255: truncation shows it, rounding does not."""
    value, side, out, low, high, nearest = case
    resized = resize_area(np.full((side, side, 3), value, np.uint8), [(out, out)])[0]
    truncated, rounded = (images.to_uint8(resized, profile=profile) for profile in ("tf", "accurate"))
    assert (truncated.min(), truncated.max()) == (low, high)
    assert (rounded == nearest).all()


def test_golden_jpegs_end_to_end(shared: pathlib.Path) -> None:
    """Both DCTs decode as TensorFlow does; the tf profile is TensorFlow's decode, crop, resize and cast."""
    folder = shared / "golden_resize"
    expected = np.load(folder / "expected_jpeg_u8.npz")
    for case in json.loads((folder / "manifest.json").read_text())["jpeg"]:
        data = (folder / case["jpg"]).read_bytes()
        for profile, dct in (("tf", "ifast"), ("accurate", "islow")):
            pixels = images.decode(data, profile=profile).pixels
            assert sha256(pixels) == case[f"sha256_decoded_{dct}"]
            for side in (32, 64):
                resized = resize_area(images.center_crop(pixels), [(side, side)])[0]
                key = f"{case['jpg'][:-4]}__{dct}__{side}"
                assert np.array_equal(images.to_uint8(resized, profile="tf"), expected[key]), key


def test_modes_become_rgb() -> None:
    rng = np.random.default_rng(0)
    rgb = rng.integers(0, 256, (8, 9, 3)).astype(np.uint8)
    gray = rgb[:, :, 0]
    rgba = np.dstack([rgb, rng.integers(0, 256, (8, 9)).astype(np.uint8)])
    cases = [
        (Image.fromarray(rgb), rgb, ()),
        (Image.fromarray(gray), gray[:, :, None].repeat(3, 2), ("gray_to_rgb",)),
        (Image.fromarray(rgba), rgb, ("alpha_dropped",)),
        (Image.fromarray(gray.astype(np.uint16) * 256 + 77), gray[:, :, None].repeat(3, 2), ("bit_depth_16",)),
    ]
    for image, expected, conversions in cases:
        decoded = images.decode(encoded(image, "PNG"), profile="tf")
        assert np.array_equal(decoded.pixels, expected), image.mode
        assert set(conversions) <= set(decoded.conversions)
        if image.mode != "RGBA":  # a colour is transparent
            keyed = encoded(image, "PNG", transparency=(0, 1, 2) if image.mode == "RGB" else 0)
            decoded = images.decode(keyed, profile="tf")
            assert np.array_equal(decoded.pixels, expected), image.mode
            assert {*conversions, "alpha_dropped"} <= set(decoded.conversions)
    palette = Image.fromarray(rgb).quantize(16)
    decoded = images.decode(encoded(palette, "PNG"), profile="tf")
    assert np.array_equal(decoded.pixels, np.asarray(palette.convert("RGB"))) and decoded.conversions == ("palette",)


@pytest.mark.parametrize(
    ("reason", "data"),
    [
        ("empty", b""),
        ("not_an_image", b"<!DOCTYPE html><p>404</p>"),
        ("truncated", encoded(Image.effect_noise((64, 64), 50).convert("RGB"), "JPEG")[:900]),
        ("truncated", encoded(Image.new("RGB", (64, 64)), "JPEG")[:40]),
        ("decompression_bomb", encoded(Image.new("1", (11_000, 11_000)), "PNG")),
        ("unsupported_format", encoded(Image.new("RGB", (8, 8)), "TIFF")),
        (
            "animated",
            encoded(Image.new("L", (8, 8)), "GIF", save_all=True, append_images=[Image.new("L", (8, 8), 255)]),
        ),
    ],
    ids=["empty", "text", "cut", "header_only", "bomb", "tiff", "animated"],
)
def test_unusable_has_a_reason(reason: str, data: bytes) -> None:
    with pytest.raises(images.UnusableImage) as error:
        images.decode(data, profile="tf")
    assert error.value.reason == reason


def png_of(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A black PNG, written by hand; a large one without all its pixels."""
    rows = zlib.compress(bytes(min(height * (3 * width + 1), 1000)), 9)
    parts = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), *chunks, (b"IDAT", rows), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    )


def jpeg_of(width: int, height: int) -> bytes:
    """A small JPEG with another size in its header."""
    data = bytearray(encoded(Image.new("RGB", (16, 16)), "JPEG"))
    struct.pack_into(">HH", data, data.index(b"\xff\xc0") + 5, height, width)
    return bytes(data)


def webp_of(width: int, height: int) -> bytes:
    """A one-colour lossless WebP with another size in its header."""
    data = bytearray(encoded(Image.new("RGBA", (16, 16), (1, 2, 3, 4)), "WEBP", lossless=True))
    at = data.index(b"VP8L") + 9
    flags = struct.unpack_from("<I", data, at)[0] >> 28
    struct.pack_into("<I", data, at, (width - 1) | (height - 1) << 14 | flags << 28)
    return bytes(data)


def memory_kib(name: str) -> int:
    """Of this process: VmRSS as it is, VmHWM the most since the last "5" in clear_refs."""
    return int(re.search(rf"{name}:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())[1])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("reason", "data"),
    [
        (None, lambda: png_of(4, 4, (b"zTXt", b"k\0\0" + zlib.compress(bytes(80_000_000), 9)))),
        ("decompression_bomb", lambda: png_of(100_000_000, 1)),
        ("decompression_bomb", lambda: webp_of(8_001, 8_001)),
        ("decompression_bomb", lambda: jpeg_of(10_001, 10_000)),
    ],
    ids=["text", "one long row", "webp", "jpeg"],
)
def test_bombs_are_refused_or_left_out_without_much_memory(reason: str | None, data: Callable[[], bytes]) -> None:
    bomb = data()
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = memory_kib("VmRSS")
    with pytest.raises(images.UnusableImage) if reason else contextlib.nullcontext() as error:
        images.decode(bomb, profile="tf")
    assert reason is None or error.value.reason == reason
    assert memory_kib("VmHWM") - before < 100_000


def test_header_size_reads_no_pixels() -> None:
    image = Image.effect_noise((70, 40), 50).convert("RGB")
    assert images.header_size(encoded(image, "PNG")[:200]) == (40, 70)
    assert images.header_size(encoded(image, "JPEG")[:700]) == (40, 70)


def test_center_crop_and_tiles() -> None:
    pixels = np.arange(5 * 8 * 3, dtype=np.uint8).reshape(5, 8, 3)
    assert np.array_equal(images.center_crop(pixels), pixels[:, 1:6])
    assert np.array_equal(images.center_crop(pixels.transpose(1, 0, 2)), pixels.transpose(1, 0, 2)[1:6])
    assert images.tile_origins(5, 8, size=4, stride=2) == [(0, 0), (0, 2), (0, 4)]
    assert images.tile_origins(8, 8, size=4, stride=4) == [(0, 0), (0, 4), (4, 0), (4, 4)]
    assert images.tile_origins(3, 8, size=4, stride=2) == []


def test_low_depth_keeps_the_high_bits() -> None:
    values = np.arange(256, dtype=np.uint8)
    for bits in range(1, 9):
        low = parquet.low_depth(values, bits)
        assert low.dtype == np.uint8 and np.array_equal(low, np.arange(256) // 2 ** (8 - bits))
    with pytest.raises(ValueError, match="bits is 9"):
        parquet.low_depth(values, 9)


def test_flags_round_trip() -> None:
    names = ("cmyk", "gray_to_rgb", "upscaled")
    assert set(images.conversions_of(images.flags_of(names))) == set(names)


# ---- choices beyond the profile ------------------------------------------------------------------------------------


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_can_be_applied(orientation: int) -> None:
    from PIL import ImageOps

    small = Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 7, 3)).astype(np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(small.resize((70, 50)), "JPEG", exif=exif, quality=95)
    decoded = images.decode(data, profile="accurate", exif="apply")
    upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    assert np.array_equal(decoded.pixels, upright)
    assert decoded.conversions == (() if orientation == 1 else ("exif_orientation_applied",))
    assert images.header_size(data, exif="apply") == upright.shape[:2]
    ignored = images.decode(data, profile="tf")
    assert ignored.pixels.shape == (50, 70, 3) and images.header_size(data) == (50, 70)
    assert ignored.conversions == (() if orientation == 1 else ("exif_orientation_ignored",))


def test_suffix_that_says_another_format_is_flagged() -> None:
    data = encoded(Image.new("RGB", (20, 20)), "PNG")
    for name, flags in (("a.JPEG", ("wrong_extension",)), ("a.PNG", ()), ("train/a#0012", ()), (None, ())):
        assert images.decode(data, profile="tf", name=name).conversions == flags
    assert images.decode(encoded(Image.new("RGB", (9, 7)), "PNG"), profile="tf").conversions == ("tiny",)


def test_damaged_pixels_are_flagged_or_refused() -> None:
    assert images.decode(damaged_jpeg(), profile="tf").conversions == ("jpeg_warning",)
    with pytest.raises(images.UnusableImage, match="corrupt_data"):
        images.decode(damaged_jpeg(), profile="tf", strict_jpeg=True)
