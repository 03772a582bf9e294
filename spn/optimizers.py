"""Optimisers: TensorFlow's RMSProp (the paper's, table 4), AdamW, and Muon with AdamW beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spn.config import TrainConfig


class TFRMSProp(torch.optim.Optimizer):
    """RMSProp as TensorFlow 1 defines it (tf.train.RMSPropOptimizer, dense, not centred).

    ms <- ms + (g^2 - ms)(1 - decay), from ms = 1;  mom <- momentum mom + lr g / sqrt(ms + epsilon);  w <- w - mom.
    Not torch.optim.RMSprop, which starts ms at 0, adds epsilon outside the root and multiplies lr outside the momentum.
    """

    def __init__(self, params: Any, *, lr: float, momentum: float, decay: float, epsilon: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay, "epsilon": epsilon})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None, "the loss is not evaluated again"
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                if not self.state[p]:
                    self.state[p]["mean_square"] = torch.ones_like(p)
                    self.state[p]["moment"] = torch.zeros_like(p)
            grads = [p.grad for p in params]
            mean_square = [self.state[p]["mean_square"] for p in params]
            moment = [self.state[p]["moment"] for p in params]
            # Horizontal, over all tensors at once: a kernel for each line instead of one for each tensor and line.
            torch._foreach_lerp_(mean_square, torch._foreach_mul(grads, grads), 1 - group["decay"])
            root = torch._foreach_add(mean_square, group["epsilon"])
            torch._foreach_sqrt_(root)
            torch._foreach_mul_(moment, group["momentum"])
            torch._foreach_addcdiv_(moment, grads, root, value=group["lr"])
            torch._foreach_sub_(params, moment)


class Muon(torch.optim.Optimizer):
    """Momentum whose update is brought to nearly orthogonal matrices (Jordan et al. 2024), for matrices only.

    m <- momentum m + (1 - momentum) g;  u = (1 - momentum) g + momentum m
    w <- w (1 - lr weight_decay) - lr sqrt(max(1, rows / columns)) O(u)
    with O five Newton-Schulz steps towards the nearest orthogonal matrix. A convolution counts as [rows, all else], a
    tensor of three axes as a matrix for each head; `parts` cuts one whose maps stand one below the other.
    """

    def __init__(
        self, params: Sequence[Tensor], *, lr: float, momentum: float, weight_decay: float, parts: Mapping[Tensor, int]
    ) -> None:
        super().__init__(list(params), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.parts = parts

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None, "the loss is not evaluated again"
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                if not self.state[p]:
                    self.state[p]["moment"] = torch.zeros_like(p)
            grads, moments = [p.grad for p in params], [self.state[p]["moment"] for p in params]
            torch._foreach_lerp_(moments, grads, 1 - group["momentum"])
            by_shape: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
            for p, update in zip(params, torch._foreach_lerp(grads, moments, group["momentum"]), strict=True):
                update = update if p.ndim == 3 else update.reshape(self.parts.get(p, 1), -1, p[0].numel())
                by_shape.setdefault(tuple(update.shape), []).append((p, update))
            if group["weight_decay"]:
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            for (_, rows, columns), members in by_shape.items():
                updates = orthogonalised(torch.stack([update for _, update in members]))
                updates *= -group["lr"] * max(1.0, rows / columns) ** 0.5
                changed = [p for p, _ in members]
                torch._foreach_add_(
                    changed, [u.view(p.shape).to(p.dtype) for p, u in zip(changed, updates, strict=True)]
                )


def orthogonalised(matrices: Tensor) -> Tensor:
    """[..., rows, columns] -> about U V^T of each matrix U S V^T: singular values within about 0.7 and 1.2.

    In bfloat16 on a GPU: only the direction counts.
    """
    x = matrices.to(torch.bfloat16) if matrices.is_cuda else matrices
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


def make_optimizers(model: nn.Module, config: TrainConfig) -> tuple[torch.optim.Optimizer, ...]:
    """The optimiser that the configuration names; muon: with an AdamW for what it does not train."""
    params = list(model.parameters())
    if config.optimizer == "rmsprop":
        return (
            TFRMSProp(
                params, lr=config.learning_rate, momentum=config.momentum, decay=config.decay, epsilon=config.epsilon
            ),
        )
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices = [p for p in params if p.ndim >= 2 and id(p) not in tables]
    others = [p for p in params if p.ndim < 2 or id(p) in tables]  # norm gains, biases, embeddings: not decayed
    if config.optimizer == "adamw":
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        betas = (config.momentum, config.decay)
        return (torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.epsilon),)
    assert config.optimizer == "muon", config.optimizer
    head = {id(p) for name, p in model.named_parameters() if name.startswith("decoder.head.")}
    hidden = [p for p in matrices if id(p) not in head]  # logits are no hidden units: their map learns as embeddings do
    others += [p for p in matrices if id(p) in head]
    muon = Muon(
        hidden,
        lr=config.learning_rate,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        parts=_stacked_maps(model),
    )
    adamw = torch.optim.AdamW(
        others, lr=config.adamw_learning_rate, betas=(0.9, config.decay), eps=config.epsilon, weight_decay=0.0
    )
    for group in adamw.param_groups:
        group["lr_scale"] = config.adamw_learning_rate / config.learning_rate  # one schedule for both
    return muon, adamw


def _stacked_maps(model: nn.Module) -> dict[Tensor, int]:
    stacked = ((module, getattr(module, "stacked", {})) for module in model.modules())
    return {module.get_parameter(f"{name}.weight"): maps for module, held in stacked for name, maps in held.items()}
