"""Finds how much fits into a GPU's memory by trying it, and trying less after running out of memory."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterable, Iterator

import torch

from data_prep.files import UserError

_OF_LIBRARIES = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory")  # which do not ask PyTorch for memory


def halved(size: int, *, divides: int | None = None) -> Iterator[int]:
    """size, then about half of it, down to 1; with `divides` the next smaller divisors of that number."""
    while size:
        if divides is not None:
            size = next(n for n in range(size, 0, -1) if divides % n == 0)
        yield size
        size //= 2


def largest_that_fits(sizes: Iterable[int], attempt: Callable[[int], object]) -> int:
    """The first size for which `attempt` does not run out of GPU memory; 0 if there is none."""
    for size in sizes:
        try:
            attempt(size)
            return size
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        free_memory()  # here, where no traceback refers to tensors any more
    return 0


def free_memory() -> None:
    """Gives back what nothing refers to. Networks are compiled again: for the next size, not for any size."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def naming_full_memory(setting: str, size: int) -> Iterator[None]:
    """Running out of GPU memory becomes one line that names the setting, of which `size` was too much."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"{setting}: the GPU's memory does not hold {size:,} at once any more; set less") from error


def is_out_of_memory(error: BaseException | None) -> bool:
    """Also if the compiler, which tries kernels on the GPU, raised an error of its own because of it."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error) for text in _OF_LIBRARIES):
            return True
        error = error.__cause__ or error.__context__
    return False
