"""Bytes to training pixels: decode, crop, resize, reduce depth. Pure functions on arrays.

The `tf` profile equals TensorFlow's default operations bit for bit (JPEG with the fast integer DCT, ResizeArea,
cast to uint8), so that numbers compare with data sets that were made with them.

Shapes: H W image, C colour channels (3), R side of a training image. Arrays are (H, W, C).
"""

from __future__ import annotations

import io
import math
import warnings
from dataclasses import dataclass

import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError

from data_prep.files import printable
from data_prep.resize import resize_area

MAX_PIXELS = 100_000_000  # of one source image; checked in the header, before memory is taken
MAX_WEBP_PIXELS = 64_000_000  # its decoder takes twice the memory per pixel of the others

# One bit each in the `flags` column. Append only: old data sets keep their meaning.
CONVERSIONS = (
    "gray_to_rgb",
    "palette",
    "alpha_dropped",
    "bit_depth_16",
    "cmyk",
    "exif_orientation_ignored",
    "jpeg_warning",
    "trailing_bytes",
    "upscaled",
    "tiny",
    "wrong_extension",
    "exif_orientation_applied",
)

TINY_SIDE = 8  # pixels; images with a shorter side are used, but counted

_PILLOW_FORMATS = ("PNG", "GIF", "BMP", "WEBP")
_JPEG_MAGIC = b"\xff\xd8\xff"
_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
_TIFF_MAGIC = (b"II*\x00", b"MM\x00*")
_EXIF_ORIENTATION = 0x0112
_FORMAT_OF_SUFFIX = {"jpg": "JPEG", "jpeg": "JPEG", "png": "PNG", "gif": "GIF", "bmp": "BMP", "webp": "WEBP"}
# EXIF orientation: what turns the stored pixels upright.
_UPRIGHT = {
    2: lambda p: p[:, ::-1],
    3: lambda p: p[::-1, ::-1],
    4: lambda p: p[::-1],
    5: lambda p: p.transpose(1, 0, 2),
    6: lambda p: np.rot90(p, -1),
    7: lambda p: p.transpose(1, 0, 2)[::-1, ::-1],
    8: lambda p: np.rot90(p),
}


class Unusable(Exception):
    """What must not be used. `reason` is a stable code, `message` is for people."""

    def __init__(self, reason: str, message: str) -> None:
        message = printable(message)  # it may hold names from files
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message

    def __reduce__(self) -> tuple:
        return type(self), (self.reason, self.message)


class UnusableImage(Unusable):
    """An image that must go to quarantine."""


@dataclass(frozen=True)
class Decoded:
    pixels: np.ndarray  # (H, W, 3) uint8
    conversions: tuple[str, ...]  # of CONVERSIONS, what was done beyond plain decoding


def decode(
    data: bytes, *, profile: str, name: str | None = None, exif: str = "ignore", strict_jpeg: bool = False
) -> Decoded:
    """Decodes an encoded image by its content. `profile` decides the DCT of JPEGs.

    `name`: only to flag a suffix that says another format. `exif`: ignore the orientation, as TensorFlow does, or
    apply it. `strict_jpeg`: damaged pixels that decoders accept are corrupt_data instead of a flag. Raises
    UnusableImage: empty, not_an_image, unsupported_format, decompression_bomb, truncated, corrupt_data, animated.
    """
    if not data:
        raise UnusableImage("empty", "the file has 0 bytes")
    if data.startswith(_JPEG_MAGIC):
        kind, pixels, conversions = "JPEG", *_decode_jpeg(data, profile=profile, strict=strict_jpeg)
    else:
        with _open(data) as image:
            if (num_frames := getattr(image, "n_frames", 1)) > 1:
                raise UnusableImage("animated", f"{image.format} with {num_frames} frames")
            kind = image.format or ""
            pixels, conversions = _to_rgb(image, sixteen_bit=data.startswith(_PNG_MAGIC) and data[24] == 16)
    orientation = _exif_orientation(data)
    if orientation in _UPRIGHT:
        conversions.append(f"exif_orientation_{'applied' if exif == 'apply' else 'ignored'}")
        pixels = _UPRIGHT[orientation](pixels) if exif == "apply" else pixels
    suffix = name.rpartition(".")[2].lower() if name else ""
    if _FORMAT_OF_SUFFIX.get(suffix, kind) != kind:
        conversions.append("wrong_extension")
    if min(pixels.shape[:2]) < TINY_SIDE:
        conversions.append("tiny")
    return Decoded(pixels, tuple(conversions))


def from_raw(data: bytes, *, planar: bool) -> Decoded:
    """Raw uint8 of a square, in planes of R, G and B or interleaved."""
    side = math.isqrt(len(data) // 3)
    assert side * side * 3 == len(data), f"{len(data)} bytes are not a square of RGB pixels"
    flat = np.frombuffer(data, np.uint8)
    return Decoded(flat.reshape(3, side, side).transpose(1, 2, 0) if planar else flat.reshape(side, side, 3), ())


def header_size(data: bytes, *, exif: str = "ignore") -> tuple[int, int]:
    """(height, width) in pixels from the header alone. Raises UnusableImage."""
    if not data:
        raise UnusableImage("empty", "the file has 0 bytes")
    if data.startswith(_JPEG_MAGIC):
        height, width, _ = _jpeg_header(data)
    else:
        with _open(data) as image:
            height, width = image.height, image.width
    return (width, height) if exif == "apply" and _exif_orientation(data) >= 5 else (height, width)


def _jpeg_header(data: bytes) -> tuple[int, int, str]:
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError as error:
        raise UnusableImage("truncated", f"JPEG header: {error}") from None
    _refuse_bomb(height, width)
    return height, width, colorspace


def _decode_jpeg(data: bytes, *, profile: str, strict: bool) -> tuple[np.ndarray, list[str]]:
    _, _, colorspace = _jpeg_header(data)
    conversions: list[str] = []
    if colorspace in ("CMYK", "YCCK"):
        # libjpeg-turbo does not invert the values that Adobe's writers store inverted; Pillow does.
        with _open(data) as image:
            pixels, conversions = _to_rgb(image)
    else:
        options = dict(colorspace="RGB", fastdct=profile == "tf", fastupsample=False)
        try:
            pixels = simplejpeg.decode_jpeg(data, **options)
        except ValueError as error:
            # A file that ends early lacks pixels. Other recoverable errors are damaged pixels, which TensorFlow and
            # Pillow accept in silence: accepted here too, so that counts agree, but flagged.
            if "premature end of jpeg file" in str(error).lower():
                raise UnusableImage("truncated", str(error)) from None
            if strict:
                raise UnusableImage("corrupt_data", str(error)) from None
            try:
                pixels = simplejpeg.decode_jpeg(data, strict=False, **options)
            except ValueError as fatal:
                raise UnusableImage("corrupt_data", str(fatal)) from None
            conversions.append("jpeg_warning")
        if colorspace == "Gray":
            conversions.append("gray_to_rgb")
    if not data.endswith(b"\xff\xd9"):
        conversions.append("trailing_bytes")
    return pixels, conversions


def _exif_orientation(data: bytes) -> int:
    """1 (upright) where the image says nothing."""
    head = data[:65536]
    if b"Exif\x00\x00" not in head and (data.startswith(_JPEG_MAGIC) or b"eXIf" not in data):
        return 1
    try:
        with Image.open(io.BytesIO(data), formats=(*_PILLOW_FORMATS, "JPEG")) as image:
            return int(image.getexif().get(_EXIF_ORIENTATION, 1))
    except Exception:  # broken metadata harms no pixel
        return 1


def _open(data: bytes) -> Image.Image:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # _refuse_bomb decides
            image = Image.open(io.BytesIO(data), formats=(*_PILLOW_FORMATS, "JPEG"))
    except Image.DecompressionBombError as error:
        raise UnusableImage("decompression_bomb", str(error)) from None
    except UnidentifiedImageError:
        if data.startswith(_TIFF_MAGIC):
            raise UnusableImage("unsupported_format", "TIFF") from None
        raise UnusableImage("not_an_image", f"starts with {data[:16]!r}") from None
    except Exception as error:  # a damaged file fails in many ways
        raise UnusableImage("corrupt_data", str(error)) from None
    _refuse_bomb(image.height, image.width, limit=MAX_WEBP_PIXELS if image.format == "WEBP" else MAX_PIXELS)
    return image


def _refuse_bomb(height: int, width: int, *, limit: int = MAX_PIXELS) -> None:
    if height * width > limit:
        raise UnusableImage("decompression_bomb", f"header says {width}x{height}, more than {limit} pixels")


def _to_rgb(image: Image.Image, *, sixteen_bit: bool = False) -> tuple[np.ndarray, list[str]]:
    conversions = ["bit_depth_16"] if sixteen_bit else []
    try:
        image.load()
    except MemoryError:  # a row of pixels that is too long for the decoder
        message = f"{image.format} of {image.width}x{image.height} pixels needs too much memory"
        raise UnusableImage("decompression_bomb", message) from None
    except Exception as error:  # a damaged file fails in many ways
        reason = "truncated" if "truncated" in str(error) else "corrupt_data"
        raise UnusableImage(reason, str(error)) from None
    mode = image.mode
    if mode.startswith("I;16"):
        # Pillow's own conversion from 16 bits clips in some versions; the high byte is what libpng keeps.
        gray = (np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8)
        return np.repeat(gray[:, :, None], 3, axis=2), [*conversions, "gray_to_rgb"]
    if mode in ("I", "F"):
        raise UnusableImage("unsupported_format", f"{image.format} of mode {mode}")
    if mode == "P":
        conversions.append("palette")
        if "transparency" in image.info:
            image, mode = image.convert("RGBA"), "RGBA"
    if mode in ("1", "L", "LA"):
        conversions.append("gray_to_rgb")
    if mode in ("LA", "PA", "RGBA", "La", "RGBa"):
        conversions.append("alpha_dropped")  # dropped, not composited on a background: as TensorFlow does
    if mode == "CMYK":
        conversions.append("cmyk")
    if image.mode != "RGB":
        image = image.convert("RGB")
    return np.asarray(image), conversions


def center_crop(pixels: np.ndarray) -> np.ndarray:
    """The central square of the short side: (H, W, C) -> (min, min, C), a view."""
    height, width = pixels.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return pixels[top : top + side, left : left + side]


def tile_origins(height: int, width: int, *, size: int, stride: int) -> list[tuple[int, int]]:
    """(top, left) of every whole tile, row by row. Empty when the image is smaller than a tile."""
    return [(y, x) for y in range(0, height - size + 1, stride) for x in range(0, width - size + 1, stride)]


def to_uint8(pixels: np.ndarray, *, profile: str) -> np.ndarray:
    """float32 within 0 and 255 -> uint8: `tf` truncates as a cast does, `accurate` rounds to nearest."""
    return (np.rint(pixels) if profile == "accurate" else pixels).astype(np.uint8)


def resize_squares(square: np.ndarray, sides: list[int], *, profile: str) -> dict[int, np.ndarray]:
    """(H, W, 3) uint8 -> side: (side, side, 3) uint8, for several sides in one pass over the pixels.

    An array that is not a square is squashed into one; one of the right size is returned unchanged. `profile` decides
    the rounding.
    """
    others = [side for side in sides if square.shape[:2] != (side, side)]
    resized = resize_area(square, [(side, side) for side in others]) if others else []
    found = {side: to_uint8(array, profile=profile) for side, array in zip(others, resized, strict=True)}
    return {side: found.get(side, square) for side in sides}


def flags_of(conversions: tuple[str, ...]) -> int:
    """Conversions as the bit field of the `flags` column."""
    return sum(1 << CONVERSIONS.index(name) for name in set(conversions))


def conversions_of(flags: int) -> list[str]:
    return [name for i, name in enumerate(CONVERSIONS) if flags >> i & 1]
