"""GPU memory that sampling a chain takes, and the largest batch that fits: counted from shapes, without a GPU.

Weights, caches and states are counted by making them on torch's meta device with the code that makes them on a GPU;
what passes between them, by running that code there, as a GPU would run it (meta.py), and adding up what is alive at
once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from spn.config import SPNConfig
from spn.gpu.fused import FusedDecoder
from spn.meta import AsOnGPU, peak_bytes, sum_bytes, usable_bytes
from spn.model import SPN
from spn.sampling import EMBEDDED_AT_ONCE

IMAGE_TENSORS = 8  # of 8 bytes a value, that drawing a chain keeps: uniform numbers, known values, both also in slices
MOST = 1024  # images a batch: what one more of them costs falls no further, and a chunk is written when all is drawn
TILE = 16  # images that the kernels work on together


def largest_batch(configs: Sequence[SPNConfig], free_bytes: int, *, precision: str, most: int = MOST) -> int:
    """Images a batch, at most `most`, that fit into the free memory of a GPU; 0 if not even one does.

    Of sizes above a tile, whole tiles.
    """
    available = usable_bytes(free_bytes)
    networks = [_Network(config, precision) for config in configs]

    def fits(batch: int) -> bool:
        return _bytes(networks, batch) <= available

    if fits(most):
        return most
    low, high = 0, most  # `low` fits, `high` does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low if low < TILE else low // TILE * TILE


def batch_bytes(configs: Sequence[SPNConfig], batch: int, *, precision: str) -> int:
    """Bytes that a process allocates which draws batches of this size through all stages: it keeps every stage's
    networks, decoders and recorded graphs; of what passes, the largest counts."""
    return _bytes([_Network(config, precision) for config in configs], batch)


class _Network:
    """One stage's network and decoder on the meta device."""

    def __init__(self, config: SPNConfig, precision: str) -> None:
        self.config, self.precision = config, precision
        self.embedding: dict[int, int] = {}  # bytes by images at once
        with torch.device("meta"):
            self.model = SPN(config).eval()
        self.weights = sum_bytes([*self.model.parameters(), *self.model.buffers()])
        made: list[FusedDecoder] = []
        dtype = getattr(torch, precision)
        with torch.no_grad():
            self.folding = peak_bytes(
                lambda: made.append(FusedDecoder(self.model, 1, dtype=dtype)), apart_from=self.model.parameters()
            )
        (self.decoder,) = made

    def stays(self, batch: int) -> int:
        """The network, and its decoder with all that it reads and writes."""
        self.decoder.resize(batch)
        return self.weights + decoder_bytes(self.decoder) + self._row()

    def passes(self, batch: int) -> int:
        self.decoder.resize(batch)
        batch = min(batch, EMBEDDED_AT_ONCE)
        if batch not in self.embedding:
            self.embedding[batch] = self._embedding(batch)
        return max(self.folding, self._row(), self.embedding[batch])

    def _row(self) -> int:
        """Alive at once while a row starts: once in the recorded graph, for good, once in the row before it."""
        with torch.no_grad():
            return peak_bytes(self.decoder.start_row, apart_from=decoder_tensors(self.decoder))

    def _embedding(self, batch: int) -> int:
        if self.model.embedder is None:
            return 0
        size = self.config.image_size
        image = torch.zeros((batch, 3, size, size), dtype=torch.long, device="meta")
        index = torch.zeros((batch,), dtype=torch.long, device="meta")
        given = image if self.config.num_given_bits else None
        own = [*self.model.parameters(), *self.model.buffers(), image, index]
        with torch.no_grad():
            return peak_bytes(lambda: self._context(image, index, given), apart_from=own)

    def _context(self, image: Tensor, index: Tensor, given: Tensor | None) -> Tensor | None:
        with AsOnGPU(self.precision):
            return self.model.context(image, index, given)


def _bytes(networks: Sequence[_Network], batch: int) -> int:
    kept = sum(network.stays(batch) for network in networks)
    values = 3 * networks[0].config.image_size ** 2
    return kept + batch * values * 8 * IMAGE_TENSORS + max(network.passes(batch) for network in networks)


def decoder_bytes(decoder: FusedDecoder) -> int:
    """Of its own weights, caches and states."""
    return sum_bytes(decoder_tensors(decoder))


def decoder_tensors(decoder: FusedDecoder) -> list[Tensor]:
    return [x for x in tree_leaves([vars(decoder), vars(decoder.weights)]) if isinstance(x, Tensor)]
