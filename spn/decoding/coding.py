"""Lossless compression by a chain: decoding is sampling, with a coder's state in place of the uniform numbers.

Range asymmetric numeral systems (Duda 2013): each image has a state of 63 bits, renewed by words of 32 bits, which ends
at a checksum of its values. A value costs at most 2.2e-5 bits more than -log2 of its probability, and never more than
24 bits. The smallest difference in a probability breaks decoding, so both directions run the sampler's own step, at the
same batch width and on the same kind of device (`numerics`).

B batch, H W image, h w slice, V values.
"""

from __future__ import annotations

import platform
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spn.bitdepth import stage_values
from spn.config import first_given
from spn.decoding.incremental import BITS
from spn.evaluation import scored_slices
from spn.model import SPN
from spn.ordering import image_to_slices
from spn.sampling import sample_chain

LOWEST = 2**31  # a state below it takes in a word
SHORTEST = 5  # bytes of a state, which takes up to 8: with words of 4 bytes a stream's length says how many
DECODER = "auto"  # on a GPU: the fused kernels if they cover the network


def encode(models: Mapping[str, SPN], images: Tensor, *, batch: int, **options: Any) -> Iterator[bytes]:
    """A stream for each image [N, 3, H, W] of the chain's depth, `batch` at once. options: those of `sample_chain`."""
    for part in images.split(batch):
        padded = part.new_zeros((batch, *part.shape[1:]), dtype=torch.long)
        padded[: len(part)] = part
        encoder = Encoder(slices_in_order(models, padded))
        _sample(models, encoder, batch, options)
        yield from encoder.streams([*map(_checksum, padded.to(torch.uint8).cpu())])[: len(part)]


def decode(
    models: Mapping[str, SPN], streams: Sequence[bytes], *, batch: int, **options: Any
) -> Iterator[Tensor | None]:
    """The image, uint8 [3, H, W], of each stream; None if it is not what was encoded with this batch and options."""
    device = next(next(iter(models.values())).parameters()).device
    for start in range(0, len(streams), batch):
        part = streams[start : start + batch]
        if not any(part):  # of a file that is cut short
            yield from [None] * len(part)
            continue
        decoder = Decoder([*part, *[b""] * (batch - len(part))], device)
        images = _sample(models, decoder, batch, options)
        for _, image, end in zip(part, images.to(torch.uint8).cpu(), decoder.ends(), strict=False):
            yield image if end == _checksum(image) else None


def _sample(models: Mapping[str, SPN], coder: Encoder | Decoder, batch: int, options: Mapping[str, Any]) -> Tensor:
    drawn = sample_chain(models, seed=0, images=range(batch), coder=coder, decoder=DECODER, **options)
    return list(drawn.values())[-1]


def _checksum(image: Tensor) -> int:
    """The state that an image, uint8, ends at."""
    return LOWEST + zlib.crc32(image.numpy().tobytes()) % LOWEST


def slices_in_order(models: Mapping[str, SPN], images: Tensor) -> list[Tensor]:
    """The values [B, 3, h, w] of each slice that the chain generates, in its order."""
    slices, configs = list[Tensor](), [model.config for model in models.values()]
    depth = configs[-1].num_given_bits + configs[-1].num_bits
    for model, own in zip(models.values(), configs, strict=True):
        values, _ = stage_values(images, stored_bits=depth, given_bits=own.num_given_bits, num_bits=own.num_bits)
        numbers = scored_slices(model, first_given=first_given(own.stage, models))
        slices += image_to_slices(values, own.scaling_factor)[:, numbers.start : numbers.stop].unbind(1)
    return slices


class Encoder:
    """Puts values into streams, all images at once.

    The plain decoder calls `code` for each value; the fused one codes on the GPU, between `lend` and `take_back`.
    """

    def __init__(self, slices: Iterable[Tensor] = ()) -> None:
        self._slices, self._intervals = iter(slices), list[Tensor]()

    def known(self) -> Tensor:
        """The next slice."""
        return next(self._slices)

    def code(self, logits: Tensor, values: Tensor) -> Tensor:
        self._intervals.append(torch.stack(interval(frequencies(logits), values))[:, None].int())
        return values

    def lend(self, states: Tensor, read: Tensor, words: Tensor) -> None:
        """Nothing: known values leave a state as it is."""

    def take_back(self, states: Tensor, read: Tensor, intervals: Tensor) -> None:
        """intervals [2, B, 3, h, w]: start and size of each value of the slice."""
        self._intervals.append(intervals.permute(0, 3, 4, 2, 1).flatten(1, 3).clone())

    def streams(self, ends: Sequence[int]) -> list[bytes]:
        """One for each image; ends: the states, from LOWEST to 2 LOWEST, that decoding ends at."""
        starts, sizes = torch.cat(self._intervals, 1).cpu().numpy()
        words, given, states = np.empty(starts.shape, ">u4"), np.empty(starts.shape, bool), np.array(ends)
        for t in reversed(range(len(starts))):
            size = sizes[t].astype(np.int64)
            words[t], given[t] = states & 0xFFFFFFFF, states >= size << (63 - BITS)
            whole, rest = np.divmod(np.where(given[t], states >> 32, states), size)
            states = (whole << BITS) + rest + starts[t]
        heads = [state.to_bytes(max(SHORTEST, -(-state.bit_length() // 8)), "big") for state in states.tolist()]
        return [head + words[given[:, b], b].tobytes() for b, head in enumerate(heads)]


class Decoder:
    """Takes values out of streams, all images at once. Damaged streams give values, too, but not their checksum."""

    def __init__(self, streams: Sequence[bytes], device: torch.device) -> None:
        streams = [(bytes(-len(stream) % 4) + stream).rjust(8, b"\0") for stream in streams]
        words = np.zeros((len(streams), 1 + max(map(len, streams)) // 4), np.int64)  # zeros after the last word
        for own, stream in zip(words, streams, strict=True):
            own[: len(stream) // 4] = np.frombuffer(stream, ">u4")
        self._words = torch.from_numpy(words).to(device)
        self._states = (self._words[:, :1] % 2**31 << 32) + self._words[:, 1:2]  # [B, 1], as all below
        self._read = torch.full_like(self._states, 2)
        self._num_words = torch.tensor([[len(stream) // 4] for stream in streams], device=device)

    def known(self) -> None:
        """Nothing is."""

    def code(self, logits: Tensor, values: None = None) -> Tensor:
        sizes = frequencies(logits)
        place, ends = self._states & (2**BITS - 1), sizes.cumsum(-1)
        found = (ends <= place).sum(-1, keepdim=True).clamp(max=sizes.shape[-1] - 1)
        size = sizes.gather(1, found)
        states = size * (self._states >> BITS) + place + size - ends.gather(1, found)
        word = self._words.gather(1, self._read.clamp(max=self._words.shape[1] - 1))
        renewed = states < LOWEST
        self._states = torch.where(renewed, (states << 32) + word, states)
        self._read += renewed
        return found[:, 0]

    def lend(self, states: Tensor, read: Tensor, words: Tensor) -> None:
        """The states, and as many of the next words as a slice may take in: words [B, 3 h w]; read: none of them."""
        at = self._read + torch.arange(words.shape[1], device=words.device)
        words.copy_(self._words.gather(1, at.clamp(max=self._words.shape[1] - 1)))
        states.copy_(self._states)
        read.zero_()

    def take_back(self, states: Tensor, read: Tensor, intervals: Tensor) -> None:
        self._states.copy_(states)
        self._read += read

    def ends(self) -> list[int]:
        """The state that each image ends at; -1 if its words were not all that its values took in."""
        return torch.where(self._read == self._num_words, self._states, -1)[:, 0].tolist()


def frequencies(logits: Tensor) -> Tensor:
    """Logits [B, V] -> int64 [B, V]: shares of 2^BITS, each at least 1, of which up to V are left to nobody."""
    return (torch.softmax(logits.double(), dim=-1) * (2**BITS - logits.shape[-1])).long() + 1


def interval(sizes: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """(start, size) [B] of values [B] among frequencies [B, V]. Integers: the order of summing changes nothing."""
    size = sizes.gather(1, values[:, None])[:, 0]
    return sizes.cumsum(-1).gather(1, values[:, None])[:, 0] - size, size


def numerics(device: str, *, precision: str) -> dict[str, str]:
    """What rounding depends on beside the batch width: decoding needs all of it as it was."""
    card, capability = platform.processor(), torch.backends.cpu.get_cpu_capability()
    if device == "cuda":
        card, capability = torch.cuda.get_device_name(), "{}.{}".format(*torch.cuda.get_device_capability())
    elif (linux := Path("/proc/cpuinfo")).exists() and (named := re.search(r"model name\s*: (.*)", linux.read_text())):
        card = named[1]
    found = {"device": device, "card": card, "capability": capability, "precision": precision, "decoder": "plain"}
    if device == "cuda":
        import triton

        found |= {"decoder": DECODER, "triton": triton.__version__}
    return {**found, "torch": torch.__version__}
