"""GPU memory counted on torch's meta device, which has shapes but no memory.

Code runs there as it would on a GPU, and what is alive at once is added up. On a GPU attention runs in kernels that
never make its weights, and autocast chooses the type of each call. The meta device knows neither: it would make the
weights, several times over, and stay in float32.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KEPT_BACK = 0.08  # of the free memory: blocks of the allocator that are not full
CODE_BYTES = 2**30  # kernels, their workspaces, recorded graphs


def usable_bytes(free_bytes: int) -> int:
    """Of a GPU's free memory, what tensors can be counted on to get."""
    return int(free_bytes * (1 - KEPT_BACK)) - CODE_BYTES


def bytes_to_have(num_bytes: int) -> int:
    """Free memory of a GPU of which so much is usable."""
    return int((num_bytes + CODE_BYTES) / (1 - KEPT_BACK)) + 2


# ---- what is alive ------------------------------------------------------------------------------------------------


def sum_bytes(tensors: Iterable[Tensor]) -> int:
    """Of the storages behind tensors, each once, however many views there are of it."""
    return sum(storage.nbytes() for storage in _storages(list(tensors)))


def peak_bytes(function: Callable[[], Any], *, apart_from: Iterable[Tensor]) -> int:
    """Most bytes that tensors made by `function` hold at once."""
    with _Alive(apart_from) as alive:
        function()
    return alive.peak


def _storages(tensors: Iterable[Tensor]) -> Iterator[Any]:
    yield from {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}.values()


class _Alive(TorchDispatchMode):
    """Follows what is allocated and freed; tensors that were there before are left out."""

    def __init__(self, apart_from: Iterable[Tensor]) -> None:
        super().__init__()
        self.before = list(apart_from)  # kept, so that no other storage gets an address of theirs
        self.known = {storage._cdata for storage in _storages(self.before)}
        self.bytes = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self.known:
                storage = tensor.untyped_storage()
                self.known.add(storage._cdata)
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes()).atexit = False
        self.peak = max(self.peak, self.bytes)
        return out

    def _freed(self, address: int, num_bytes: int) -> None:
        self.known.discard(address)
        self.bytes -= num_bytes


# ---- as on a GPU --------------------------------------------------------------------------------------------------


# Calls of these networks that autocast runs in half precision, and those that it runs in float32. The embedding is not
# among autocast's own: layers.IntensityEmbedding asks for the type itself.
IN_HALF = {
    *(F.linear, F.conv2d, F.scaled_dot_product_attention, F.embedding),
    *(torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.bmm, torch.addmm),
}
IN_FLOAT32 = {F.layer_norm, F.rms_norm}
FLASH_HEAD_DIM = 256  # the most that flash attention takes, in half precision; it pads heads to a multiple of 8


class AsOnGPU(TorchFunctionMode):
    """Within it, calls on the meta device allocate what they would on a GPU under autocast to `precision`."""

    def __init__(self, precision: str) -> None:
        super().__init__()
        self.half = torch.bfloat16 if precision == "bfloat16" else None
        self.copies: dict[nn.Parameter, Tensor] = {}  # of weights: autocast makes one each and keeps it to its end

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.half is not None and func in IN_HALF:
            args, kwargs = self._cast(args, self.half), {k: self._cast(v, self.half) for k, v in (kwargs or {}).items()}
        elif self.half is not None and func in IN_FLOAT32:
            args = self._cast(args, torch.float32)
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        if func is F.dropout:
            return _dropout(*args, **(kwargs or {}))
        beside: list[Tensor] = []  # until the call has ended
        if func is F.conv2d:  # the library may lay out anew what it reads
            beside = [torch.empty_like(x) for x in args[:2]]
        elif func is F.embedding:  # values that the backward pass would look up (layers.IntensityEmbedding)
            beside = [args[0].to(torch.uint8)]
        result = func(*args, **(kwargs or {}))
        del beside
        return result

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self._cast(each, dtype) for each in value)
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype == dtype:
            return value
        if not isinstance(value, nn.Parameter):
            return value.to(dtype)
        if value not in self.copies:
            self.copies[value] = value.to(dtype)
        return self.copies[value]


def _attention(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, dropout_p: float = 0.0, scale: float | None = None
) -> Tensor:
    """The kernel that a GPU takes: q [..., heads, T, d], k and v [..., heads, keys, d] -> [..., heads, T, d]."""
    head_dim, half = q.shape[-1], q.dtype != torch.float32
    if half and head_dim <= FLASH_HEAD_DIM:
        padded = [F.pad(x, (0, -head_dim % 8)) if head_dim % 8 else x for x in (q, k, v)]
        scale = head_dim**-0.5 if scale is None else scale
        out = torch.ops.aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, scale=scale)[0]
        return out[..., :head_dim]
    if head_dim % (8 if half else 4) == 0:
        needs_grad = torch.is_grad_enabled()
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        return efficient(q, k, v, None, needs_grad, dropout_p, is_causal, scale=scale)[0]
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, dropout_p=dropout_p, scale=scale)


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """A GPU keeps a mask of one byte an element."""
    assert not inplace
    return torch.native_dropout(x, p, True)[0] if training and p > 0 else x
