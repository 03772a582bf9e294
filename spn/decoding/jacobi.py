"""Drawing all values of a slice at once by Jacobi iteration (Wiggers & Hoogeboom 2020; Song et al. 2021).

A value follows from its uniform number and from the values before it. Every pass of the whole decoder draws all values
again, each from what the pass before gave those ahead of it. After n passes at least the first n values are final, and
where the network is nearly certain, nearly all are after a few. When a pass changes nothing, each value is the one that
`sampling.sample_slice_slowly` draws with the same number.

B batch, h w slice, V values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from spn.decoding.incremental import Draws, pick
from spn.model import SPN

PASSES_AT_ONCE = 2  # on a GPU, before the CPU waits to hear whether the last one changed a value


class JacobiDecoder:
    """Decodes batches of slices of one network with its own weights. On a GPU a pass is recorded once, as a graph."""

    def __init__(
        self,
        model: SPN,
        batch: int,
        *,
        temperature: float = 1.0,
        top_p: float | None = None,
        precision: str = "float32",
    ) -> None:
        config, device = model.config, next(model.parameters()).device
        self.decoder, self.temperature, self.top_p = model.decoder, temperature, top_p
        self.on_gpu, self.half = device.type == "cuda", precision == "bfloat16"
        self.graph: torch.cuda.CUDAGraph | None = None
        self.num_passes = 0  # of all slices so far
        size = config.slice_size
        shape = (batch, 3, size, size)
        self.values = torch.zeros(shape, dtype=torch.long, device=device)
        self.uniform = torch.zeros(shape, dtype=torch.float64, device=device)
        self.is_known = torch.zeros((size, 1), dtype=torch.bool, device=device)
        self.changed = torch.zeros((), dtype=torch.bool, device=device)
        self.context: Tensor | None = None

    @torch.no_grad()
    def __call__(self, context: Tensor | None, draws: Draws, *, on_row: Callable[[], None] | None = None) -> Tensor:
        """Context s [B, h, w, channels] -> values [B, 3, h, w], chosen by `draws`; all calls of on_row at the end."""
        assert (draws.temperature, draws.top_p) == (self.temperature, self.top_p), "recorded for other draws"
        assert draws.coder is None, "a coder takes one value after the other"
        self.uniform.copy_(draws.uniform)
        self.values.zero_() if draws.guess is None else self.values.copy_(draws.guess)
        self.is_known.fill_(False)
        if draws.known is not None:
            self.values[:, :, : draws.known_rows] = draws.known
            self.is_known[: draws.known_rows] = True
        if context is not None:
            self.context = context.clone() if self.context is None else self.context.copy_(context)
        if self.on_gpu and self.graph is None:
            self._record()
        run, at_once = (self._pass, 1) if self.graph is None else (self.graph.replay, PASSES_AT_ONCE)
        self.changed.fill_(True)
        while self.changed.item():
            for _ in range(at_once):
                run()
            self.num_passes += at_once
        if on_row is not None:
            for _ in range(self.values.shape[2]):
                on_row()
        return self.values.clone()

    def _pass(self) -> None:
        """Draws every value again, from those before it."""
        # A recorded pass must not depend on autocast's cache of weights, which is renewed outside it.
        with torch.autocast("cuda", torch.bfloat16, enabled=self.on_gpu and self.half, cache_enabled=False):
            logits = self.decoder(self.values, self.context)  # [B, 3, V, h, w]
        flat = logits.movedim(2, -1).flatten(0, -2)  # [B * 3 * h * w, V]
        drawn = pick(flat, self.uniform.flatten(), self.temperature, self.top_p).view(self.values.shape)
        drawn = torch.where(self.is_known, self.values, drawn)
        self.changed.copy_((drawn != self.values).any())
        self.values.copy_(drawn)

    def _record(self) -> None:
        values = self.values.clone()
        self._pass()  # what libraries prepare at their first call
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._pass()
        self.graph = graph
        self.values.copy_(values)
