"""Drawing many values of a slice at once by Jacobi iteration (Wiggers & Hoogeboom 2020; Song et al. 2021).

A value follows from its uniform number and from the values before it. Every pass draws all values of a few rows again,
each from what the pass before gave those ahead of it. After n passes at least the first n values are final; where the
network is nearly certain, nearly all are after a few. Rows that a pass leaves as they were, with all above them, are
final: the next pass begins below, and what the layers found in them is kept. Each value is then the one that
`sampling.sample_slice_slowly` draws with the same number. On a GPU whole slices are drawn (spn/gpu/jacobi.py).

B batch, h w slice, V values, D attention width, R residual channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spn.decoding.incremental import Draws, pick
from spn.model import SPN, shift_one_pixel
from spn.modern import STEM_ROWS

ROWS_AT_ONCE = 4  # more take fewer passes, which take longer


class JacobiDecoder:
    """Decodes batches of slices of one network, with the weights that it has now or will have."""

    def __init__(self, model: SPN) -> None:
        self.decoder, self.size, self.num_passes = model.decoder, model.config.slice_size, 0
        self.kept: dict[Any, Tensor] = {}  # of the slice that is decoded

    @torch.no_grad()
    def __call__(self, context: Tensor | None, draws: Draws, *, on_row: Callable[[], None] | None = None) -> Tensor:
        """Context s [B, h, w, channels] -> values [B, 3, h, w], chosen by `draws`."""
        assert draws.coder is None, "a coder takes one value after the other"
        values = torch.zeros_like(draws.uniform, dtype=torch.long) if draws.guess is None else draws.guess.clone()
        if draws.known is not None:
            values[:, :, : draws.known_rows] = draws.known
        is_known, row = torch.arange(self.size)[:, None] < draws.known_rows, 0
        while row < self.size:
            rows = slice(row, min(row + ROWS_AT_ONCE, self.size))
            logits, uniform = self._logits(values, context, rows), draws.uniform[:, :, rows].permute(0, 2, 3, 1)
            drawn = pick(logits.flatten(0, 3), uniform.flatten(), draws.temperature, draws.top_p).view(uniform.shape)
            drawn = torch.where(is_known[rows], values[:, :, rows], drawn.permute(0, 3, 1, 2))  # [B, 3, rows, w]
            unchanged = (drawn == values[:, :, rows]).transpose(0, 2).flatten(1).all(1)
            values[:, :, rows] = drawn
            self.num_passes += 1
            for _ in range(int(unchanged.cumprod(0).sum())):  # drawn from final values, so final themselves
                row += 1
                if on_row is not None:
                    on_row()
        return values

    def _logits(self, values: Tensor, context: Tensor | None, rows: slice) -> Tensor:
        """Logits [B, rows, w, 3, V] of some rows; those above are final, those below are not read."""
        decoder, count = self.decoder, rows.stop - rows.start
        stack = decoder.attention
        here = slice(rows.start * self.size, rows.stop * self.size)  # positions
        pixels = decoder.intensity(values[:, :, : rows.stop].permute(0, 2, 3, 1))  # [B, rows so far, w, 24]
        x = stack.project(shift_one_pixel(pixels)[:, here])  # [B, positions, D]
        if decoder.stem is not None:
            x = x + decoder.stem(pixels[:, max(rows.start - STEM_ROWS + 1, 0) :])[:, -x.shape[1] :]
            if decoder.surroundings is not None:
                assert context is not None
                x = x + decoder.surroundings(context[:, rows]).flatten(1, 2)
        x, cos_sin = stack.encode_positions(x, here)
        mask = torch.full((x.shape[1], here.stop), -torch.inf, dtype=x.dtype).triu(here.start + 1)
        for layer in stack.layers:
            q, k, v = layer.queries_keys_values(x, cos_sin)  # [B, heads, positions, D / heads] each
            k, v = (self._with_earlier((layer, name), new, here, dim=2) for name, new in (("k", k), ("v", v)))
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = layer.after_attention(x, attended)
        cond = stack.norm(x).unflatten(1, (count, self.size))  # [B, rows, w, D]
        if context is not None:
            cond = torch.cat([cond, context[:, rows]], dim=-1)
        near = slice(max(rows.start - 2, 0), rows.stop)  # and the two rows above, which the PixelCNN reads
        cond, x = self._with_earlier("cond", cond, rows)[:, near], pixels[:, near]
        for gated in decoder.layers:
            x = gated(x, cond)  # [B, rows, w, R]
            if decoder.direct is not None and gated.is_first:
                x = x + decoder.direct(cond)
            x = self._with_earlier(gated, x[:, -count:], rows)[:, near]
        x = F.relu(x) if decoder.norm is None else decoder.norm(x)
        return decoder.head(x[:, -count:]).unflatten(-1, (3, -1))

    def _with_earlier(self, name: Any, new: Tensor, here: slice, *, dim: int = 1) -> Tensor:
        """What is kept under a name up to `here`, and then `new`, which replaces what was there."""
        self.kept[name] = torch.cat([self.kept.get(name, new).narrow(dim, 0, here.start), new], dim)
        return self.kept[name]
