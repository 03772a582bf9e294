"""Pixels equal TensorFlow's bit for bit; odd images are converted or named.  pytest tests/data_prep/test_images.py"""

from __future__ import annotations

import hashlib
import io
import json
import pathlib

import numpy as np
import pytest
from PIL import Image

from data_prep import images

# (height, width, out height, out width): sha256 of TensorFlow 2.21's float32 output, sha256 of it cast to uint8, for
# the input that `formula_image` gives. Sizes are chosen so that another order of the sums, or a fused multiply-add,
# changes some value.
TENSORFLOW_AREA = {
    (500, 375, 32, 32): (
        "f47a941cd697811a70864703e4ca5b6ac33e6ec49666fd579436b029e8c5f2c0",
        "4ec71eedf0bdc73d632ca3bde29004b9cbf03839a6aaf47c189fc7f96c484f56",
    ),
    (500, 375, 256, 256): (
        "c2087c4785da364b6fdb4b3546ae8e7de82dfc79beccde48c5888cfb0f215684",
        "f5437d1022951f662b52c84413f9ea115505c842ec6692b70c54e83d042bf258",
    ),
    (333, 333, 256, 256): (
        "21f343a90ac652d82790a0c5f37daca23553704ed62cf538dd23cb2345c88219",
        "d4de6039c99ba423e94a269b8df2a15cc16653ddd55ff6babade5cef8b9ea0b5",
    ),
    (1025, 769, 256, 256): (
        "80e5e32c5625b2f11033d3a00d51d022004fb326fbb4eb4db4eb7ffdb5cf9fba",
        "3daa4b79fae836680f1a8e7f4cf81817c38ac75b9bd786f73255fa0087f71cdc",
    ),
    (200, 300, 256, 256): (
        "be22427e230f2bc4023aa528b9462865df77f25709c12e6dfe728b8d2b5431a4",
        "4657d27396bfb86523e90634f0254fcc1929d87778e2a8c1ba4cf1a446f6d8b9",
    ),
    (500, 500, 100, 100): (
        "1810419269ae7096770881a9c3224775974777eda6fdf705c08aded82be2e714",
        "c649b09015eae12a1177b1cfbe6b19e83ee69b6d384d373ababe48ac6db91419",
    ),
    (511, 389, 33, 57): (
        "39ed5f0d79fb1ca9970c7355be2451f1e557b8b322fd925c10842c93c14d0aff",
        "c03be07815e988f5a729ec0cd752f4bfc2ca7d8358bb387e5e0f434201f27895",
    ),
}


def formula_image(height: int, width: int) -> np.ndarray:
    y, x, c = np.meshgrid(np.arange(height), np.arange(width), np.arange(3), indexing="ij")
    return ((7 * y + 13 * x + 29 * c + (y * x) % 251) % 256).astype(np.uint8)


def sha256(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("size", TENSORFLOW_AREA, ids=str)
def test_area_resize_equals_tensorflow(size: tuple[int, int, int, int]) -> None:
    height, width, out_height, out_width = size
    resized = images.resize_area(formula_image(height, width), out_height, out_width)
    assert resized.dtype == np.float32
    as_float, as_uint8 = TENSORFLOW_AREA[size]
    assert sha256(resized) == as_float
    assert sha256(images.to_uint8(resized, profile="tf")) == as_uint8


def test_flat_white_loses_a_level_as_in_tensorflow() -> None:
    """The float32 reciprocal of the area makes 254.99998 of some flat 255: truncation shows it, rounding does not."""
    white = np.full((281, 281, 3), 255, np.uint8)
    resized = images.resize_area(white, 32, 32)
    truncated, rounded = (images.to_uint8(resized, profile=profile) for profile in ("tf", "accurate"))
    assert (truncated.min(), truncated.max()) == (254, 255)
    assert (rounded == 255).all()


def test_area_resize_by_hand() -> None:
    square = np.arange(16, dtype=np.uint8).reshape(4, 4, 1).repeat(3, axis=2)
    halved = images.resize_area(square, 2, 2)[:, :, 0]
    assert np.array_equal(halved, [[2.5, 4.5], [10.5, 12.5]])
    assert np.array_equal(images.resize_area(square, 4, 4), square.astype(np.float32))


def test_golden_pngs(shared: pathlib.Path) -> None:
    folder = shared / "golden_resize"
    cases = json.loads((folder / "manifest.json").read_text())["cases"]
    expected = np.load(folder / "expected_f32.npz")
    for case in cases:
        pixels = images.decode((folder / case["png"]).read_bytes(), profile="tf").pixels
        for out in case["outputs"]:
            resized = images.resize_area(pixels, out["oh"], out["ow"])
            assert np.array_equal(resized, expected[out["key"]]), out["key"]
            assert sha256(np.rint(resized).astype(np.uint8)) == out["sha256_rint_u8"]


def test_golden_formula_images(shared: pathlib.Path) -> None:
    cases = json.loads((shared / "golden_resize" / "manifest.json").read_text())["synthetic"]
    for case in cases:
        resized = images.resize_area(formula_image(case["h"], case["w"]), case["oh"], case["ow"])
        assert sha256(resized) == case["sha256_f32"], case["key"]


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
                resized = images.resize_area(images.center_crop(pixels), side, side)
                key = f"{case['jpg'][:-4]}__{dct}__{side}"
                assert np.array_equal(images.to_uint8(resized, profile="tf"), expected[key]), key


def test_every_damaged_file_is_treated_as_written_down(shared: pathlib.Path) -> None:
    suffixes = (".jpeg", ".jpg", ".png", ".gif", ".tiff")
    cases = json.loads((shared / "bad_inputs" / "expected.json").read_text())["cases"]
    checked = 0
    for case in cases:
        if case["action"] == "skip" or not case["file"].lower().endswith(suffixes):
            continue
        data = (shared / "bad_inputs" / case["file"]).read_bytes()
        if case["action"] == "quarantine":
            with pytest.raises(images.UnusableImage) as error:
                images.decode(data, profile="tf")
            assert error.value.reason == case["reason"], case["file"]
        else:
            decoded = images.decode(data, profile="tf", name=case["file"])
            assert decoded.pixels.dtype == np.uint8 and decoded.pixels.shape[2] == 3
            if case["reason"] in images.CONVERSIONS:
                assert case["reason"] in decoded.conversions, case["file"]
        checked += 1
    assert checked > 20


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
    palette = Image.fromarray(rgb).quantize(16)
    decoded = images.decode(encoded(palette, "PNG"), profile="tf")
    assert np.array_equal(decoded.pixels, np.asarray(palette.convert("RGB"))) and decoded.conversions == ("palette",)


def test_orientation_is_ignored_and_flagged() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(Image.new("RGB", (30, 20), (200, 10, 10)), "JPEG", exif=exif)
    decoded = images.decode(data, profile="tf")
    assert decoded.pixels.shape == (20, 30, 3) and decoded.conversions == ("exif_orientation_ignored",)


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
        low = images.low_depth(values, bits)
        assert low.dtype == np.uint8 and np.array_equal(low, np.arange(256) // 2 ** (8 - bits))
    with pytest.raises(ValueError, match="bits is 9"):
        images.low_depth(values, 9)


def test_flags_round_trip() -> None:
    names = ("cmyk", "gray_to_rgb", "upscaled")
    assert set(images.conversions_of(images.flags_of(names))) == set(names)
