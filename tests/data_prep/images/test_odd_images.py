"""What decoders trip over: unusual images are decoded, metadata harms no pixel, damage is refused by a reason.

pytest tests/data_prep/images/test_odd_images.py                     with a few hundred randomly damaged images
pytest -m faults tests/data_prep/images/test_odd_images.py           with 100,000
python tests/data_prep/images/test_odd_images.py BEGIN END FILE      some of them, for a debugger
"""

from __future__ import annotations

import io
import itertools
import os
import pathlib
import signal
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from PIL import Image, ImageOps

from data_prep import images
from tests.data_prep.made import encoded

ROOT = pathlib.Path(__file__).parents[3]
LIMIT_SEC = 20  # of one image; they take about a millisecond
REASONS = {"not_an_image", "unsupported_format", "decompression_bomb", "truncated", "corrupt_data", "animated", "empty"}


# ---- unusual images ------------------------------------------------------------------------------------------------


def rgb_image() -> Image.Image:
    small = np.random.default_rng(0).integers(0, 256, (4, 6, 3)).astype(np.uint8)
    return Image.fromarray(small).resize((30, 22), Image.Resampling.BICUBIC)


def chunk(name: bytes, data: bytes, *, checksum: int | None = None) -> bytes:
    checksum = zlib.crc32(name + data) if checksum is None else checksum
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", checksum)


def segment(marker: int, data: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(data) + 2) + data


def jpeg_of(
    factors: Sequence[tuple[int, int]], *, head: bytes = b"", restart: int = 0, height: int = 40, width: int = 52
) -> bytes:
    """A baseline JPEG of several components with these (horizontal, vertical) factors, `head` behind its first marker.

    Its blocks are flat: the change of the mean, by a code of 4 bits for its length, and a 0 for the end of the block.
    """
    rng, scans = np.random.default_rng(0), [""]
    num_x, num_y = -(-width // (8 * max(h for h, _ in factors))), -(-height // (8 * max(v for _, v in factors)))
    mean = [0] * len(factors)
    for number in range(num_x * num_y):
        if restart and number and number % restart == 0:
            scans.append("")
            mean = [0] * len(factors)
        for component, (h, v) in enumerate(factors):
            for value in rng.integers(-60, 60, h * v).tolist():
                change, mean[component] = value - mean[component], value
                size = abs(change).bit_length()
                scans[-1] += f"{size:04b}" + (f"{change + (change < 0) * (2**size - 1):0{size}b}" if size else "") + "0"
    pixels = b""
    for i, bits in enumerate(scans):
        padded = bits + "1" * (-len(bits) % 8)
        pixels += int(padded, 2).to_bytes(len(padded) // 8).replace(b"\xff", b"\xff\0")
        pixels += bytes([0xFF, 0xD0 + i % 8]) if i < len(scans) - 1 else b"\xff\xd9"
    count = len(factors)
    frame = struct.pack(">BHHB", 8, height, width, count)
    frame += b"".join(bytes([i + 1, h << 4 | v, 0]) for i, (h, v) in enumerate(factors))
    tables = segment(0xDB, b"\0" + bytes([8] * 64)) + segment(0xC0, frame)
    tables += segment(0xC4, b"\0" + bytes([0, 0, 0, 12] + [0] * 12) + bytes(range(12)))
    tables += segment(0xC4, b"\x10" + bytes([1] + [0] * 15) + b"\0")
    tables += segment(0xDD, struct.pack(">H", restart)) if restart else b""
    scan = bytes([count]) + b"".join(bytes([i + 1, 0]) for i in range(count)) + b"\0\x3f\0"
    return b"\xff\xd8" + head + tables + segment(0xDA, scan) + pixels


def test_jpegs_of_all_sampling_factors_are_decoded() -> None:
    """As Pillow does, which has no fast DCT: in flat blocks the two agree."""
    num_decoded = 0
    for h, v, restart in itertools.product((1, 2, 3, 4), (1, 2, 3, 4), (0, 2)):
        for factors in ([(h, v), (1, 1), (1, 1)], [(h, v), (1, v), (h, 1)], [(1, 1), (1, 1), (1, 1), (h, v)]):
            data = jpeg_of(factors, restart=restart)
            try:
                expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
            except OSError:  # libjpeg has no more than ten blocks in a unit, and no halves
                with pytest.raises(images.UnusableImage):
                    images.decode(data, profile="tf")
                continue
            assert np.array_equal(images.decode(data, profile="tf").pixels, expected), (factors, restart)
            assert images.header_size(data) == expected.shape[:2]
            num_decoded += 1
    assert num_decoded == 60


JFIF = b"JFIF\0\1\1\0\0\1\0\1\0\0"
HEADS = {
    "JFIF 0.0": segment(0xE0, b"JFIF\0\0\0\0\0\1\0\1\0\0"),
    "unknown transform of Adobe": segment(0xEE, b"Adobe\0\x64\0\0\0\0\2"),
    "JFIF beside Adobe's RGB": segment(0xE0, JFIF) + segment(0xEE, b"Adobe\0\x64\0\0\0\0\0"),
    "profile in parts 1 and 3": segment(0xE2, b"ICC_PROFILE\0\1\3abc") + segment(0xE2, b"ICC_PROFILE\0\3\3abc"),
    "profile in part 2 of 1": segment(0xE2, b"ICC_PROFILE\0\2\1abc"),
    "bytes before the first segment": b"\0abc" + segment(0xE0, JFIF),
    "bytes between segments": segment(0xE0, JFIF) + b"abc\xff\xff",
    "EXIF that points nowhere": segment(0xE1, b"Exif\0\0II*\0\xff\xff\xff\xff"),
    "empty segments": segment(0xE0, b"") + segment(0xE1, b"") + segment(0xEE, b"") + segment(0xFE, b""),
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_what_libjpeg_warns_of_in_a_header_changes_no_pixel(head: bytes) -> None:
    for options in ({}, dict(progressive=True), dict(restart_marker_blocks=2)):
        clean = encoded(rgb_image(), "JPEG", **options)
        odd = clean[:2] + head + clean[20:]  # in place of the JFIF segment
        for profile, strict in itertools.product(("tf", "accurate"), (False, True)):
            found = images.decode(odd, profile=profile, strict_jpeg=strict)
            assert np.array_equal(found.pixels, images.decode(clean, profile=profile).pixels) and not found.conversions
        assert images.header_size(odd) == (22, 30)


TEXT = zlib.compress(b"x" * 3_000_000)
CHUNKS = {
    "text": chunk(b"zTXt", b"k\0\0" + TEXT),
    "international text": chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + TEXT),
    "profile": chunk(b"iCCP", b"p\0\0" + TEXT),
    "damaged profile": chunk(b"iCCP", b"p\0\0abc"),
    "short gamma": chunk(b"gAMA", b""),
    "wrong checksum": chunk(b"tEXt", b"k\0abc", checksum=1),
}


@pytest.mark.parametrize("metadata", CHUNKS.values(), ids=CHUNKS)
def test_metadata_of_a_png_is_not_its_pixels(metadata: bytes) -> None:
    png = encoded(rgb_image(), "PNG")
    for at in (33, len(png) - 12):  # behind the header, before the end
        data = png[:at] + metadata + png[at:]
        assert np.array_equal(images.decode(data, profile="tf").pixels, np.asarray(rgb_image()))
        assert images.header_size(data) == (22, 30)


def test_every_place_that_says_an_orientation_is_heeded() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    xmp = b'<x:xmpmeta tiff:Orientation="6"/>'
    png, jpeg = encoded(rgb_image(), "PNG"), encoded(rgb_image(), "JPEG")
    far = segment(0xE2, bytes(60_000)) + segment(0xE2, bytes(60_000)) + segment(0xE1, exif.tobytes())
    raw = exif.tobytes().hex().encode()
    texts = (b"Raw profile type exif\0\nexif\n%d\n" % (len(raw) // 2) + raw, b"XML:com.adobe.xmp\0\0\0\0\0" + xmp)
    for data in [
        encoded(rgb_image(), "PNG", exif=exif),
        encoded(rgb_image(), "WEBP", exif=exif),
        encoded(rgb_image(), "WEBP", lossless=True, xmp=xmp),
        png[:33] + chunk(b"tEXt", texts[0]) + png[33:],
        png[:33] + chunk(b"iTXt", texts[1]) + png[33:],
        png[:-12] + chunk(b"eXIf", exif.tobytes()[6:]) + png[-12:],
        jpeg[:2] + far + jpeg[2:],
        jpeg[:2] + segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + xmp) + jpeg[2:],
        encoded(rgb_image(), "AVIF", exif=exif),  # it takes the orientation out of `exif`
    ]:
        found = images.decode(data, profile="accurate", exif="apply")
        assert np.array_equal(
            found.pixels, np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
        )
        assert found.pixels.shape == (30, 22, 3) and images.header_size(data, exif="apply") == (30, 22)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC"),
        (b"\0\0\0\x1cftypavif\0\0\0\0avifmif1", "AVIF"),
        (b"II*\0\x08\0\0\0", "TIFF or camera raw"),
        (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
    ],
)
def test_pictures_that_are_not_read_are_named_with_what_to_do(data: bytes, name: str) -> None:
    with pytest.raises(images.UnusableImage, match=f"^unsupported_format: .*{name}.*convert it to JPEG or PNG"):
        images.decode(data, profile="tf")


# ---- random damage -------------------------------------------------------------------------------------------------


def seeds() -> Iterator[bytes]:
    """Small images, of every format and in every way that decoders treat differently."""
    rgb = rgb_image()
    gray, rgba = rgb.convert("L"), Image.merge("RGBA", (*rgb.split(), rgb.getchannel(0)))
    exif = Image.Exif()
    exif[0x0112] = 6
    deep = Image.fromarray(np.asarray(gray).astype(np.uint16) * 257)
    other = rgb.transpose(Image.Transpose.ROTATE_180)
    for image, kind, options in [
        (rgb, "JPEG", {}),
        (rgb, "JPEG", dict(progressive=True, exif=exif, icc_profile=b"x" * 80, comment="c")),
        (rgb, "JPEG", dict(subsampling=0, restart_marker_blocks=2)),
        (gray, "JPEG", {}),
        (rgb.convert("CMYK"), "JPEG", {}),
        (rgb, "PNG", dict(exif=exif, icc_profile=b"x" * 80)),
        (rgba, "PNG", {}),
        (deep, "PNG", {}),
        (rgb.quantize(8), "PNG", dict(transparency=3)),
        (rgb.quantize(4), "PNG", dict(bits=2)),
        (rgb.convert("1"), "PNG", {}),
        (rgb, "PNG", dict(save_all=True, append_images=[other])),
        (rgb, "WEBP", dict(exif=exif, icc_profile=b"x" * 80)),
        (rgba, "WEBP", dict(lossless=True)),
        (rgba, "WEBP", dict(quality=50)),
        (rgb, "WEBP", dict(save_all=True, append_images=[other])),
        (rgb.quantize(16), "GIF", dict(transparency=1)),
        (rgb.quantize(16), "GIF", dict(save_all=True, append_images=[other.quantize(16)])),
        (rgb, "BMP", {}),
        (rgb.quantize(16), "BMP", {}),
        (rgb.convert("1"), "BMP", {}),
        (rgb, "AVIF", dict(exif=exif)),
    ]:
        yield encoded(image, kind, **options)
    for factors in ([(1, 4), (1, 1), (1, 1)], [(1, 3), (1, 1), (1, 1)], [(2, 1), (1, 1), (1, 1), (2, 1)]):
        yield jpeg_of(factors, head=segment(0xE0, b"JFIF\0\0\0\0\0\1\0\1\0\0"), restart=2, height=22, width=30)


def with_checksums(png: bytes) -> bytes:
    """Its chunks' checksums set right, so that damage gets past them."""
    data, at = bytearray(png), 8
    while (end := at + 12 + int.from_bytes(data[at : at + 4])) <= len(data):
        data[end - 4 : end] = zlib.crc32(data[at + 4 : end - 4]).to_bytes(4)
        at = end
    return bytes(data)


def damaged(seed: bytes, rng: np.random.Generator) -> bytes:
    data = bytearray(seed)
    for _ in range(rng.integers(1, 4)):
        if not data:
            break
        # Headers are short and decide most, so every other place is in the first 64 bytes.
        at = int(rng.integers(0, min(64, len(data)) if rng.random() < 0.5 else len(data)))
        size, how = int(rng.integers(1, 9)), rng.integers(0, 8)
        if how < 3:
            data[at] = rng.integers(0, 256)
        elif how == 3:
            data[at] ^= 1 << int(rng.integers(0, 8))
        elif how == 4:
            data[at : at + size] = bytes([rng.choice([0, 0xFF])]) * size
        elif how == 5:
            data[at:at] = rng.bytes(size)
        elif how == 6:
            del data[at : at + size]
        else:
            del data[max(2, at) :]
    return with_checksums(data) if data.startswith(b"\x89PNG") and rng.random() < 0.7 else bytes(data)


def decode_damaged(begin: int, end: int, last: str) -> None:
    """Ends this process at the first that takes too long; the file `last` says which was the last one begun."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it also ends a decoder that never comes back to Python
    images.MAX_PIXELS = images.MAX_WEBP_PIXELS = 2_000_000  # large ones are no damage, but slow
    whole, file = list(seeds()), os.open(last, os.O_WRONLY | os.O_CREAT)
    for number in range(begin, end):
        data = damaged(whole[number % len(whole)], np.random.default_rng(number))
        os.pwrite(file, b"%9d" % number, 0)
        signal.alarm(LIMIT_SEC)
        for read in (lambda data: images.decode(data, profile="tf", exif="apply").pixels, images.header_size):
            try:
                found = read(data)
                assert isinstance(found, tuple) or (found.ndim, found.shape[2], found.dtype) == (3, 3, np.uint8)
            except images.UnusableImage as error:
                assert error.reason in REASONS and error.message, error
    signal.alarm(0)


def run(begin: int, end: int, last: pathlib.Path) -> subprocess.Popen:
    command = [sys.executable, __file__, str(begin), str(end), str(last)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def check(process: subprocess.Popen, last: pathlib.Path) -> None:
    error = process.communicate()[1]
    assert process.returncode == 0, f"number {last.read_text().strip()} ends it ({process.returncode}): {error[-2000:]}"
    assert not error, "warnings of decoders are not printed"


def test_a_few_hundred_damaged_images(tmp_path: pathlib.Path) -> None:
    check(run(0, 600, tmp_path / "last"), tmp_path / "last")


@pytest.mark.faults
def test_a_hundred_thousand_damaged_images(tmp_path: pathlib.Path) -> None:
    bounds = list(range(0, 100_001, 100_000 // min(4, os.cpu_count() or 1)))
    runs = [
        (run(*pair, tmp_path / f"{pair[0]}"), tmp_path / f"{pair[0]}")
        for pair in zip(bounds[:-1], bounds[1:], strict=True)
    ]
    for process, last in runs:
        check(process, last)


if __name__ == "__main__":
    decode_damaged(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
