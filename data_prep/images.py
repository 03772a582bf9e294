"""Bytes to training pixels: decode, crop, resize, reduce depth. Pure functions on arrays.

The `tf` profile equals TensorFlow's default operations bit for bit (JPEG with the fast integer DCT, ResizeArea,
cast to uint8), so that numbers compare with datasets that were made with them.

Shapes: H W image, C colour channels (3), R side of a training image. Arrays are (H, W, C).
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError

from data_prep.files import is_transient, printable
from data_prep.resize import resize_area

MAX_PIXELS = 100_000_000  # of one source image; checked in the header, before memory is taken
MAX_WEBP_PIXELS = 64_000_000  # and of AVIF: their decoders take twice the memory per pixel of the others

# One bit each in the `flags` column. Append only: old datasets keep their meaning.
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

# Names of images, those of pictures that are not read among them: to be named, not skipped.
_SUFFIXES = "jpg jpeg png webp avif bmp gif jpe jfif tif tiff heic heif jxl jp2 dng cr2 cr3 nef arw orf raf rw2"
IMAGE_SUFFIXES = tuple(f".{suffix}" for suffix in _SUFFIXES.split())
_SYSTEM_FOLDERS = frozenset(("__macosx", "@eadir", "$recycle.bin"))
TINY_SIDE = 8  # pixels; images with a shorter side are used, but counted

_OTHER_FORMATS = (b"II", b"MM\0", b"FUJIFILM", b"\0\0\0\x0cJXL", b"\xff\x0a", b"\0\0\0\x0cjP")  # and what says ftyp
_JPEG_MAGIC = b"\xff\xd8"
_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
_CONVERT = "convert it to JPEG or PNG, for example by `magick mogrify -format jpg`, and remove it"
_PNG_CHUNKS = (  # that matter beside the critical ones: transparency, frames, and what may tell an orientation
    *(b"tRNS", b"acTL", b"fcTL", b"fdAT", b"eXIf"),
    *(b"iTXtXML:com.adobe.xmp\0\0", b"tEXtRaw profile type exif\0", b"zTXtRaw profile type exif\0"),
)
_ORIENTATION_MARKS = (b"Exif\0\0", b"tiff:Orientation")  # in a JPEG; in other formats these too:
_MORE_MARKS = (b"eXIf", b"EXIF", b"Raw profile type exif", b"irot", b"imir")
_FORMAT_OF_SUFFIX = {"jpg": "JPEG", "jpeg": "JPEG"} | {s: s.upper() for s in ("png", "gif", "bmp", "webp", "avif")}
# EXIF orientation: steps along rows and columns that turn the stored pixels upright, from 5 on before a transposition.
_UPRIGHT = {2: (1, -1), 3: (-1, -1), 4: (-1, 1), 5: (1, 1), 6: (-1, 1), 7: (-1, -1), 8: (1, -1)}


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


@contextlib.contextmanager
def damage_named() -> Iterator[None]:
    """Whatever reading or decoding an image raises becomes UnusableImage, but for errors of the source or storage."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, of metadata and of sizes, which _refuse_bomb judges
            yield
    except Exception as error:
        if isinstance(error, Unusable) or is_transient(error):
            raise
        text = str(error) or type(error).__name__
        reason = "truncated" if "truncated" in text.lower() else "corrupt_data"
        if isinstance(error, MemoryError | Image.DecompressionBombError):  # such as a row too long for the decoder
            reason = "decompression_bomb"
        raise UnusableImage(reason, text) from None


@damage_named()
def decode(
    data: bytes, *, profile: str, name: str | None = None, exif: str | None = None, strict_jpeg: bool = False
) -> Decoded:
    """Decodes an encoded image by its content. `profile` decides the DCT of JPEGs. Colour profiles are ignored.

    `name`: only to flag a suffix that says another format. `exif`: apply the orientation, or else ignore it, as
    TensorFlow does. `strict_jpeg`: damaged pixels that decoders accept are corrupt_data instead of a flag. Raises
    UnusableImage: empty, not_an_image, unsupported_format, decompression_bomb, truncated, corrupt_data, animated.
    """
    if data.startswith(_JPEG_MAGIC):
        kind, pixels, conversions = "JPEG", *_decode_jpeg(data, profile=profile, strict=strict_jpeg)
    else:
        image = _open(data)
        if (num_frames := getattr(image, "n_frames", 1)) > 1:
            raise UnusableImage("animated", f"{image.format} with {num_frames} frames")
        kind = image.format or ""
        pixels, conversions = _to_rgb(image, sixteen_bit=data.startswith(_PNG_MAGIC) and data[24] == 16)
    if (orientation := _orientation(data)) in _UPRIGHT:
        conversions.append(f"exif_orientation_{'applied' if exif == 'apply' else 'ignored'}")
        if exif == "apply":
            pixels = pixels[:: _UPRIGHT[orientation][0], :: _UPRIGHT[orientation][1]]
            pixels = pixels.transpose(1, 0, 2) if orientation >= 5 else pixels
    suffix = name.rpartition(".")[2].lower() if name else ""
    if _FORMAT_OF_SUFFIX.get(suffix, kind) != kind:
        conversions.append("wrong_extension")
    if min(pixels.shape[:2]) < TINY_SIDE:
        conversions.append("tiny")
    return Decoded(pixels, tuple(conversions))


@damage_named()
def from_raw(data: bytes, *, planar: bool) -> Decoded:
    """Raw uint8 of a square, in planes of R, G and B or interleaved."""
    side = math.isqrt(len(data) // 3)
    assert side * side * 3 == len(data), f"{len(data)} bytes are not a square of RGB pixels"
    flat = np.frombuffer(data, np.uint8)
    return Decoded(flat.reshape(3, side, side).transpose(1, 2, 0) if planar else flat.reshape(side, side, 3), ())


@damage_named()
def header_size(data: bytes, *, exif: str | None = None) -> tuple[int, int]:
    """(height, width) in pixels from the header alone. Raises UnusableImage."""
    height, width = _jpeg_header(data)[:2] if data.startswith(_JPEG_MAGIC) else _open(data).size[::-1]
    return (width, height) if exif == "apply" and _orientation(data) >= 5 else (height, width)


def _jpeg_header(data: bytes) -> tuple[int, int, str]:
    """(height, width, colour space; "" for what libjpeg-turbo's simple interface does not know)."""
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data, strict=False)
    except Exception:  # such as odd sampling factors
        return *_open(data).size[::-1], ""
    _refuse_bomb(height, width)
    return height, width, colorspace


def _decode_jpeg(data: bytes, *, profile: str, strict: bool) -> tuple[np.ndarray, list[str]]:
    colorspace = _jpeg_header(data)[2]
    conversions = [] if data.endswith(b"\xff\xd9") else ["trailing_bytes"]
    if colorspace in ("", "CMYK", "YCCK"):
        # libjpeg-turbo does not invert the values of CMYK that Adobe's writers store inverted; Pillow does.
        pixels, more = _to_rgb(_open(data))
        return pixels, conversions + more
    conversions += ["gray_to_rgb"] if colorspace == "Gray" else []
    fast = functools.partial(simplejpeg.decode_jpeg, colorspace="RGB", fastdct=profile == "tf", fastupsample=False)
    with contextlib.suppress(Exception):
        return fast(data), conversions
    data = _bare_jpeg(data, colorspace)
    try:
        return fast(data), conversions
    except Exception as error:
        # A file that ends early lacks pixels. Other recoverable errors are damaged pixels, which TensorFlow and Pillow
        # accept in silence: accepted here too, so that counts agree, but flagged.
        if "premature end of jpeg file" in str(error).lower():
            raise UnusableImage("truncated", str(error)) from None
        if strict:
            raise
    return fast(data, strict=False), [*conversions, "jpeg_warning"]


def _bare_jpeg(data: bytes, colorspace: str) -> bytes:
    """Tables, frame and pixels, without all that libjpeg may warn of in a header: profiles, stray bytes, versions."""
    parts, at = [b"\xff\xd8\xff\xee\0\x0eAdobe\0d\0\0\0\0" + bytes([colorspace != "RGB"])], 2
    while (at := data.index(b"\xff", at)) and (marker := data[at + 1]) != 0xDA:  # the first scan
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4])
        if 0xC0 <= marker < 0xE0:
            parts.append(data[at:end])
        at = at + 1 if marker in (0, 0xFF) else end  # there are bytes between segments
    return b"".join([*parts, data[at:]])


def _bare_png(data: bytes) -> bytes:
    """Only the chunks that decide pixels or orientation: texts and profiles may be damaged or very large."""
    parts, at = [_PNG_MAGIC], 8
    while at < len(data):
        end = at + 12 + int.from_bytes(data[at : at + 4])
        if data[at + 4 : at + 5].isupper() or data.startswith(_PNG_CHUNKS, at + 4):
            parts.append(data[at:end])
        at = end
    return b"".join(parts)


def _orientation(data: bytes) -> int:
    """By EXIF or XMP; 1 (upright) where the image says nothing, or nothing that can be understood."""
    try:
        marks = _ORIENTATION_MARKS + (() if data.startswith(_JPEG_MAGIC) else _MORE_MARKS)
        marked = any(mark in data for mark in marks)
        return int(_open(data).getexif().get(0x0112, 1)) if marked else 1
    except Exception:  # broken metadata harms no pixel
        return 1


def _open(data: bytes) -> Image.Image:
    if not data:
        raise UnusableImage("empty", "the file has 0 bytes")
    content = io.BytesIO(_bare_png(data) if data.startswith(_PNG_MAGIC) else data)
    try:
        image = Image.open(content, formats=("JPEG", "PNG", "GIF", "BMP", "WEBP", "AVIF"))
    except UnidentifiedImageError:
        message = f"starts with {data[:16]!r}"
        if data.startswith(b"version https://git-lfs"):
            message = "a pointer of Git LFS; `git lfs pull` fetches the image"
        if data.startswith(_OTHER_FORMATS) or data[4:8] == b"ftyp":
            message = f"HEIC, damaged AVIF, JPEG XL, TIFF or camera raw ({message}); {_CONVERT}"
            raise UnusableImage("unsupported_format", message) from None
        is_damaged = data.startswith((_JPEG_MAGIC, _PNG_MAGIC))
        raise UnusableImage("corrupt_data" if is_damaged else "not_an_image", message) from None
    _refuse_bomb(image.height, image.width, limit=MAX_WEBP_PIXELS if image.format in ("WEBP", "AVIF") else MAX_PIXELS)
    return image


def _refuse_bomb(height: int, width: int, *, limit: int = MAX_PIXELS) -> None:
    if height * width > limit:
        raise UnusableImage("decompression_bomb", f"header says {width}x{height}, more than {limit} pixels")


def _to_rgb(image: Image.Image, *, sixteen_bit: bool = False) -> tuple[np.ndarray, list[str]]:
    conversions = ["bit_depth_16"] if sixteen_bit else []
    image.load()
    mode = image.mode
    # An alpha channel, a transparent colour or palette entry: dropped, not composited, as TensorFlow does.
    if mode in ("LA", "PA", "RGBA", "La", "RGBa") or "transparency" in image.info:
        conversions.append("alpha_dropped")
    if mode.startswith("I;16"):
        # Pillow's own conversion from 16 bits clips in some versions; the high byte is what libpng keeps.
        gray = (np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8)
        return np.repeat(gray[:, :, None], 3, axis=2), [*conversions, "gray_to_rgb"]
    if mode in ("I", "F"):
        raise UnusableImage("unsupported_format", f"{image.format} of mode {mode}")
    if mode == "P":
        conversions.append("palette")
        if "transparency" in image.info:
            image = image.convert("RGBA")
    if mode in ("1", "L", "LA"):
        conversions.append("gray_to_rgb")
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


def is_image_name(path: str) -> bool:
    return path.lower().endswith(IMAGE_SUFFIXES)


def begins_as_image(data: bytes) -> bool:
    is_known = data.startswith((_JPEG_MAGIC + b"\xff", _PNG_MAGIC, b"GIF8", b"II*\0", b"MM\0*"))
    return is_known or data[8:12] in (b"WEBP", b"heic", b"heix", b"mif1", b"avif")


def is_hidden(path: str) -> bool:
    """Whether it is a file that systems leave beside data (.DS_Store, ._photo.jpg, Thumbs.db, @eaDir/...)."""
    *folders, name = path.lower().split("/")
    is_system = name in ("thumbs.db", "desktop.ini") or not _SYSTEM_FOLDERS.isdisjoint(folders)
    return is_system or any(part.startswith(".") and part not in (".", "..") for part in (*folders, name))


def flags_of(conversions: tuple[str, ...]) -> int:
    """Conversions as the bit field of the `flags` column."""
    return sum(1 << CONVERSIONS.index(name) for name in set(conversions))


def conversions_of(flags: int) -> list[str]:
    return [name for i, name in enumerate(CONVERSIONS) if flags >> i & 1]
