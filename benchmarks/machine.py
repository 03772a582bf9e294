"""What the benchmarks of networks share: the card's name, peak memory, and writing a result as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch


def wait(device: str) -> None:
    """Until the GPU has done what was asked of it."""
    if device == "cuda":
        torch.cuda.synchronize()


def card(device: str) -> dict[str, Any]:
    return {"card": torch.cuda.get_device_name() if device == "cuda" else device, "torch": torch.__version__}


def peak_gib(device: str) -> float | None:
    return torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None


def report(result: dict[str, Any], out: Path | None, name: str) -> None:
    """Prints the result and writes it to OUT/NAME.json."""
    print(json.dumps(result), flush=True)
    if out:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
