"""Everything random about data, as pure functions of numbers and names: the same on every machine, in every process.

Only NumPy's raw bit streams are used, which are fixed for ever; its `permutation` and `integers` may change by version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def permutation(n: int, *entropy: int) -> np.ndarray:
    """A permutation of range(n) as int64, decided by the numbers in `entropy` (each at least 0)."""
    stream = np.random.PCG64(np.random.SeedSequence(list(entropy)))
    return np.argsort(stream.random_raw(n), kind="stable")


def draws(seed: int, keys: Sequence[str], epochs: Sequence[int], *, purpose: str, high: int) -> np.ndarray:
    """One integer in [0, high) for each image of a batch, decided by (seed, key, epoch, purpose) alone.

    The same image gets the same draw wherever it lies in a batch, on whichever worker. int64, (B,). `purpose` keeps
    draws apart that must be independent (target_slice, flip). Multiplying 64 random bits by `high` and keeping the
    upper part leaves a bias below high / 2**64.
    """
    if high < 1:
        raise ValueError(f"high is {high}; it must be at least 1")
    out = np.empty(len(keys), np.int64)
    start = f"{seed}\0{purpose}\0".encode()
    for i, (key, epoch) in enumerate(zip(keys, epochs, strict=True)):
        word = hashlib.blake2b(start + f"{int(epoch)}\0{key}".encode(), digest_size=8).digest()
        out[i] = (int.from_bytes(word, "little") * high) >> 64
    return out


def rank_by_hash(names: Sequence[str], *entropy: object) -> list[str]:
    """The names in an order that adding or removing one leaves unchanged for the others."""
    start = "\0".join(map(str, entropy)) + "\0"
    return sorted(names, key=lambda name: hashlib.blake2b((start + name).encode(), digest_size=16).digest())
