"""Jacobi iteration (spn/decoding/jacobi.py) on a GPU: whole slices, each pass a CUDA graph.

Images of which a pass changed nothing are final. When half of them are, a graph for half as many images takes over. It
may round differently: each image is what its last graph's products draw one value after the other.

B batch, h w slice, V values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from spn.decoding.incremental import Draws, pick
from spn.model import SPN

PASSES_AT_ONCE = 2  # before the CPU waits to hear what the last one changed


@dataclass(frozen=True)
class Recording:
    """A pass over B images; what it reads and writes."""

    values: Tensor  # [B, 3, h, w]
    uniform: Tensor  # [B, 3, h, w]
    context: Tensor | None  # [B, h, w, channels]
    is_known: Tensor  # [h, 1]
    changed: Tensor  # [B] whether the last pass changed any value of the image
    graph: torch.cuda.CUDAGraph


class JacobiDecoder:
    """Decodes batches of slices of one network, with the weights that it has now."""

    def __init__(
        self,
        model: SPN,
        batch: int,
        *,
        temperature: float = 1.0,
        top_p: float | None = None,
        precision: str = "float32",
    ) -> None:
        self.dtype: torch.dtype = getattr(torch, precision)
        self.decoder = copy.deepcopy(model.decoder).to(self.dtype)
        self.size, self.temperature, self.top_p = model.config.slice_size, temperature, top_p
        self.widths = [batch]  # numbers of images that passes are recorded for
        while self.widths[-1] > 1:
            self.widths.append((self.widths[-1] + 1) // 2)
        self.recordings: dict[int, Recording] = {}
        self.pool = torch.cuda.graph_pool_handle()  # one for all, since they never run at the same time
        self.stream = torch.cuda.Stream()  # torch's own for this stays on the card of its first use
        self.num_passes = 0.0  # of all slices so far, on average over images

    @torch.no_grad()
    def __call__(self, context: Tensor | None, draws: Draws, *, on_row: Callable[[], None] | None = None) -> Tensor:
        """Context s [B, h, w, channels] -> values [B, 3, h, w], chosen by `draws`; all calls of on_row at the end."""
        assert (draws.temperature, draws.top_p) == (self.temperature, self.top_p), "recorded for other draws"
        assert draws.coder is None, "a coder takes one value after the other"
        values = torch.zeros_like(draws.uniform, dtype=torch.long) if draws.guess is None else draws.guess.clone()
        if draws.known is not None:
            values[:, :, : draws.known_rows] = draws.known
        todo = torch.arange(len(values), device=values.device)  # images that are not final
        while num := len(todo):
            width = min(width for width in self.widths if width >= num)
            if width not in self.recordings:
                self.recordings[width] = self._record(width, context)
            own = self.recordings[width]
            own.values[:num], own.uniform[:num] = values[todo], draws.uniform[todo]
            own.is_known[:], own.is_known[: draws.known_rows] = False, True
            if own.context is not None and context is not None:
                own.context[:num] = context[todo]
            while True:
                for _ in range(PASSES_AT_ONCE):
                    own.graph.replay()
                self.num_passes += PASSES_AT_ONCE * width / self.widths[0]
                left = int(own.changed[:num].sum())
                if left == 0 or left <= (width + 1) // 2 < width:
                    break
            values[todo] = own.values[:num]
            todo = todo[own.changed[:num]]
        if on_row is not None:
            for _ in range(self.size):
                on_row()
        return values

    def _record(self, width: int, context: Tensor | None) -> Recording:
        values = torch.zeros((width, 3, self.size, self.size), dtype=torch.long, device="cuda")
        own = Recording(
            values=values,
            uniform=torch.zeros_like(values, dtype=torch.float64),
            context=None if context is None else values.new_zeros((width, *context.shape[1:]), dtype=self.dtype),
            is_known=torch.zeros((self.size, 1), dtype=torch.bool, device="cuda"),
            changed=torch.zeros(width, dtype=torch.bool, device="cuda"),
            graph=torch.cuda.CUDAGraph(),
        )
        self._pass(own)  # what libraries prepare at their first call
        torch.cuda.synchronize()
        with torch.cuda.graph(own.graph, pool=self.pool, stream=self.stream):
            self._pass(own)
        return own

    def _pass(self, own: Recording) -> None:
        """Draws every value again, from those before it."""
        logits = self.decoder(own.values, own.context)  # [B, 3, V, h, w]
        flat = logits.movedim(2, -1).flatten(0, -2)  # [B * 3 * h * w, V]
        drawn = pick(flat, own.uniform.flatten(), self.temperature, self.top_p).view(own.values.shape)
        drawn = torch.where(own.is_known, own.values, drawn)
        own.changed.copy_((drawn != own.values).flatten(1).any(1))
        own.values.copy_(drawn)
