"""Trained networks on storage, and a stand-in for Ray that runs its actors here."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.dag.node import NodeOutput
from pipelines.pipeline import WEIGHTS
from spn.checkpoint import save_checkpoint


@pytest.fixture(scope="session")
def networks(tiny_spn: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, NodeOutput]:
    """Outputs of train nodes: a chain at 8 x 8, S = 2, bits [3, 6], re-randomised.

    Their checkpoints have no file that `pipeline.WEIGHTS` does not declare: a node that read more would fail here.
    """
    common, inputs = dict(image_size=8, scaling_factor=2, num_bits=3), {}
    for seed, stage in enumerate(("first_slice", "size_upscale", "depth_upscale")):
        model = tiny_spn(stage, seed=seed, **common, num_given_bits=3 if stage == "depth_upscale" else 0).float()
        folder = tmp_path_factory.mktemp(stage)
        (folder / "step-1").mkdir()
        save_checkpoint(folder / "step-1", model=model, ema=model, trainer={})
        for file in (folder / "step-1").iterdir():
            if f"checkpoint/{file.name}" not in WEIGHTS:
                file.unlink()
        inputs[f"train_{stage}"] = NodeOutput(str(folder), {"checkpoint": "step-1"}, f"attempt-{stage}")
    return inputs


class Actor:
    """Runs each call at once."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._worker, name)
        return SimpleNamespace(remote=lambda *arguments: Reference(method(*arguments)))


class Reference:
    """A call's result."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Pool:
    """Ray's, whose calls all take as long."""

    def __init__(self, actors: list[Actor]) -> None:
        self.actors = actors

    def map_unordered(self, call: Callable[..., Reference], values: list[Any]) -> Iterator[Any]:
        return (call(actor, value).value for actor, value in zip(itertools.cycle(self.actors), values, strict=False))


@pytest.fixture
def ray_in_this_process(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Ray's actors are objects of this process, whose calls return at once; the objects that were made."""
    made: list[Any] = []

    def no_group(name: str) -> None:
        raise ValueError(f"no group {name}")

    def remote(**_: Any) -> Callable[[type], Any]:
        def start(kind: type, *arguments: Any) -> Actor:
            made.append(kind(*arguments))
            return Actor(made[-1])

        return lambda kind: SimpleNamespace(remote=lambda *arguments: start(kind, *arguments))

    ray = SimpleNamespace(
        remote=remote,
        get=lambda found: [one.value for one in found] if isinstance(found, list) else found.value,
        kill=lambda actor: None,
        util=SimpleNamespace(
            ActorPool=Pool,
            placement_group=lambda bundles, **_: bundles,
            get_placement_group=no_group,
            remove_placement_group=lambda group: None,
            scheduling_strategies=SimpleNamespace(PlacementGroupSchedulingStrategy=lambda group: group),
        ),
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.util", ray.util)
    return made
