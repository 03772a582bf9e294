"""How values are drawn from logits: by data, so that a decoder needs no call back to Python for each value.

B batch, h w slice, V values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Draws:
    """What decides the values of a slice, beside the logits. Raises ValueError for a temperature or top_p out of range.

    The same uniform numbers give the same values from the same logits, whichever decoder computes them.
    """

    uniform: Tensor  # [B, 3, h, w] float64 in [0, 1): one number for each value
    temperature: float = 1.0  # divides the logits
    top_p: float | None = None  # mass of the nucleus that values are drawn from, see `pick`; None: all of it
    known: Tensor | None = None  # [B, 3, k, w]: values of the first k rows, taken as they are

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        check_top_p(self.top_p)

    @property
    def known_rows(self) -> int:
        return 0 if self.known is None else self.known.shape[2]

    def choose(self, logits: Tensor, row: int, column: int, channel: int) -> Tensor:
        """Values [B] at one place of the slice, from its logits [B, V]."""
        if self.known is not None and row < self.known_rows:
            return self.known[:, channel, row, column]
        return pick(logits, self.uniform[:, channel, row, column], self.temperature, self.top_p)


def check_temperature(temperature: float) -> None:
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}; it must be above 0")


def check_top_p(top_p: float | None) -> None:
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; it must be above 0 and at most 1")


def pick(logits: Tensor, uniform: Tensor, temperature: float, top_p: float | None = None) -> Tensor:
    """Values [B] drawn from softmax(logits / temperature) [B, V] by inverting its distribution at uniform [B].

    top_p: only the nucleus is drawn from, its probabilities scaled up to sum to 1. The nucleus is the smallest set of
    most likely values whose probabilities, after the temperature, sum to top_p or more; of equally likely values the
    smaller comes first. In float64, summed from the most likely down: a value belongs to the nucleus while the sum
    before it is below top_p, so the most likely one always does. None and 1 draw from all values.
    """
    probabilities = torch.softmax(logits.double() / temperature, dim=-1)
    if top_p is None or top_p == 1:
        values = (probabilities.cumsum(-1) <= uniform[:, None]).sum(-1)
        return values.clamp(max=logits.shape[-1] - 1)
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    inside = ordered.cumsum(-1) - ordered < top_p
    nucleus = torch.zeros_like(probabilities).scatter(-1, order, ordered * inside)
    mass = nucleus.cumsum(-1)
    values = (mass <= uniform[:, None] * mass[:, -1:]).sum(-1)
    # Rounding may put uniform * mass at the whole mass: the last value of the nucleus, not one beyond it.
    last = (mass < mass[:, -1:]).sum(-1)
    return values.minimum(last)
