"""On the meta device as on a GPU: types and bytes of each call follow autocast and the attention kernels.

python -m pytest tests/spn/test_meta.py
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from spn.meta import AsOnGPU, peak_bytes


def made(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="meta")


def test_counted_is_what_is_alive_at_once():
    def work() -> None:
        first = torch.zeros(1000, device="meta")  # 4000 bytes
        second = first.double()  # 8000 more
        del first
        second.view(10, 100)[0] = 1
        assert (second + 1).numel() == 1000  # 8000 more

    assert peak_bytes(work, apart_from=()) == 16_000
    before = torch.zeros(1000, device="meta")
    assert peak_bytes(lambda: before.view(10, 100) * 2, apart_from=[before]) == 4000


def test_products_run_in_half_precision_and_norms_in_float32():
    x, weight, half = made(6, 8), made(5, 8), made(6, 8, dtype=torch.bfloat16)
    with AsOnGPU("bfloat16"):
        results = [F.linear(x, weight), x @ weight.t(), torch.addmm(made(6, 5), x, weight.t()), x[None].matmul(x.t())]
        results += [F.conv2d(made(1, 8, 4, 4), made(8, 8, 3, 3)), F.embedding(made(3, dtype=torch.long), weight)]
        assert {y.dtype for y in results} == {torch.bfloat16}
        assert F.layer_norm(half, (8,)).dtype == F.rms_norm(half, (8,)).dtype == torch.float32
        assert (half + half).dtype == torch.bfloat16 and (half + x).dtype == torch.float32
    with AsOnGPU("float32"):
        assert F.linear(x, weight).dtype == torch.float32


def test_the_rules_are_those_of_autocast():
    """On the CPU, which has the same ones for products."""
    x, weight = torch.zeros(6, 8), torch.zeros(8, 8)
    calls = [
        lambda x, w: F.linear(x, w),
        lambda x, w: x @ w,
        lambda x, w: torch.addmm(x, x, w),
        lambda x, w: torch.bmm(x[None], w[None]),
        lambda x, w: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
        lambda x, w: F.relu(x) + x,
    ]
    for call in calls:
        with torch.autocast("cpu", torch.bfloat16):
            real = call(x, weight)
        with AsOnGPU("bfloat16"):
            counted = call(x.to("meta"), weight.to("meta"))
        assert (counted.dtype, counted.shape) == (real.dtype, real.shape)


def test_a_weight_is_copied_once():
    layer, x = nn.Linear(1000, 1000, bias=False, device="meta"), made(1, 1000, dtype=torch.bfloat16)
    copy = 1000 * 1000 * 2

    def work() -> None:
        with AsOnGPU("bfloat16"):
            for _ in range(3):
                layer(x)

    assert copy < peak_bytes(work, apart_from=[*layer.parameters(), x]) < 1.1 * copy


def attention_bytes(head_dim: int, precision: str) -> int:
    """Of 256 positions, two heads."""
    q = made(1, 2, 256, head_dim)

    def work() -> None:
        with AsOnGPU(precision):
            y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        assert y.shape == q.shape

    return peak_bytes(work, apart_from=[q])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_attention_makes_its_weights_only_where_no_kernel_takes_the_heads(precision):
    weights = 2 * 256 * 256 * (4 if precision == "float32" else 2)
    assert attention_bytes(8, precision) < weights / 4
    assert attention_bytes(4, precision) < weights / 4, "padded, in half precision"
    none_takes = 6 if precision == "float32" else 260
    assert attention_bytes(none_takes, precision) > weights


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [8, 6])
def test_attention_keeps_what_its_backward_pass_reads(precision, head_dim):
    q = made(1, 2, 64, head_dim).requires_grad_()
    with AsOnGPU(precision):
        F.scaled_dot_product_attention(q, q, q).sum().backward()
    assert q.grad.shape == q.shape
