"""Micro-batches follow from workers and memory: the largest that fit, the same on every machine, refused in one line.

python -m pytest tests/pipelines/test_batches.py
"""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest
import torch

from data_prep.files import UserError
from pipelines import pipeline, start
from pipelines.config import stage_batch_plan, stage_model_config, stage_train_config
from pipelines.loading import load
from pipelines.nodes.batches import GIB, BatchPlan, batch_plan
from pipelines.nodes.ray_train import check_memory
from pipelines.pipeline import nodes
from spn.config import TrainConfig
from spn.meta import usable_bytes
from spn.training_memory import TrainingMemory, training_memory

STAGE, NODE = "size_upscale", "train_size_upscale"


def on_gpu(*settings: str) -> list[str]:
    return ["resources.use_gpu=true", *settings]


def counted(*settings: str) -> TrainingMemory:
    """What a worker of the tiny network takes."""
    config = load("debug", settings)
    train = stage_train_config(config, STAGE)
    return training_memory(stage_model_config(config, STAGE), train, num_workers=config.resources.num_workers)


def memory_for(num_bytes: int) -> float:
    """GiB of a GPU of which just so many bytes are usable."""
    low, high = 0, 2**40
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if usable_bytes(middle) < num_bytes else (low, middle)
    return high / GIB


# ---- the largest that fits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_the_largest_micro_batch_that_fits_and_divides(seed):
    draw = random.Random(seed)
    num_workers, share = draw.randint(1, 8), draw.randint(1, 400)
    cap, room = draw.choice([None, draw.randint(1, 500)]), draw.randint(1, 500)
    train = TrainConfig(batch_size=num_workers * share, micro_batch_size=cap)
    plan = batch_plan(train, num_workers, memory="memory", fits=lambda size: size <= room)
    assert plan.num_workers * plan.micro_batch_size * plan.accumulation == plan.batch_size == train.batch_size
    allowed = [size for size in range(1, share + 1) if share % size == 0 and size <= (cap or share)]
    larger = [size for size in allowed if size > plan.micro_batch_size]
    assert plan.micro_batch_size in allowed and plan.micro_batch_size <= room
    assert all(size > room for size in larger), "one more divisor would not fit"
    if larger:
        assert plan.limit == "memory"
    else:
        assert plan.limit == ("a worker's share" if cap is None or cap >= share else f"train.micro_batch_size={cap}")


@pytest.mark.parametrize("settings", [(), ("resources.num_workers=2",), ("train.recompute_activations=true",)])
def test_a_stage_takes_what_its_memory_holds(settings):
    """With just so much memory, and with a little less."""
    settings = on_gpu("train.batch_size=512", *settings)
    found = counted(*settings)
    for size in (64, 256):
        least = memory_for(found.total(size))
        plan = stage_batch_plan(load("debug", [*settings, f"resources.gpu_memory_gib={least!r}"]), STAGE)
        assert (plan.micro_batch_size, plan.counted_bytes) == (size, found.total(size))
        less = load("debug", [*settings, f"resources.gpu_memory_gib={least - 1e-7!r}"])
        assert stage_batch_plan(less, STAGE).micro_batch_size == size // 2


def test_without_a_known_memory_the_share_and_the_cap_decide():
    for settings in (["resources.gpu_memory_gib=0.1"], on_gpu()):  # a CPU; a GPU of any size
        assert stage_batch_plan(load("debug", settings), STAGE).micro_batch_size == 8
    capped = stage_batch_plan(load("debug", on_gpu("resources.gpu_memory_gib=79", "train.micro_batch_size=5")), STAGE)
    assert (capped.micro_batch_size, capped.limit) == (4, "train.micro_batch_size=5")


def test_half_a_gpu_has_half_of_its_memory():
    settings = on_gpu("train.batch_size=512")
    least = memory_for(counted(*settings).total(64))
    whole, half = (
        stage_batch_plan(load("debug", [*settings, f"resources.gpu_memory_gib={gib!r}", *part]), STAGE)
        for gib, part in ((least, ()), (2 * least, ("resources.gpus_per_worker=0.5",)))
    )
    assert whole.micro_batch_size == half.micro_batch_size == 64
    assert (whole.gpu_part, half.gpu_part) == (1, 0.5)


def test_a_single_node_may_have_other_gpus():
    small = memory_for(counted(*on_gpu("train.batch_size=512")).total(64))
    settings = on_gpu("train.batch_size=512", f"resources.per_node.{NODE}.gpu_memory_gib={small!r}")
    plans = {stage: stage_batch_plan(load("debug", settings), stage) for stage in ("first_slice", STAGE)}
    assert [plan.micro_batch_size for plan in plans.values()] == [512, 64]
    assert plans[STAGE].limit.startswith(f"resources.per_node.{NODE}.gpu_memory_gib=")


def test_presets_take_what_was_measured_to_be_fast():
    """On GPUs of 80 GB; the paper's batch stays."""
    config = load("imagenet32")
    plan = stage_batch_plan(config, "baseline")
    assert (plan.micro_batch_size, plan.accumulation, plan.limit) == (128, 1, "a worker's share")
    alone = stage_batch_plan(load("imagenet32", ["resources.num_workers=1"]), "baseline")
    assert (alone.micro_batch_size, alone.accumulation, alone.limit) == (128, 8, "resources.gpu_memory_gib=79")
    assert 0.4 * 79 * GIB < alone.counted_bytes < 79 * GIB


def test_the_plan_follows_from_the_configuration_alone(monkeypatch):
    """Resumed on another machine it is the same: no GPU is asked for its memory."""

    def asked(*_: object) -> None:
        raise AssertionError("a GPU was asked")

    for name in ("is_available", "mem_get_info", "get_device_properties", "device_count"):
        monkeypatch.setattr(torch.cuda, name, asked)
    settings = on_gpu("resources.gpu_memory_gib=1.2", "train.batch_size=64")
    assert stage_batch_plan(load("debug", settings), STAGE) == stage_batch_plan(load("debug", settings), STAGE)


def test_memory_retrains_nothing():
    plain, limited = (
        {node.name: node for node in nodes(load("debug", on_gpu(*more)))}
        for more in ((), ("resources.gpu_memory_gib=1.3",))
    )
    assert {name: node.config for name, node in plain.items()} == {name: node.config for name, node in limited.items()}


# ---- what is said ---------------------------------------------------------------------------------------------------


def test_a_start_prints_the_plan_and_its_limit(run_with_gpus, capsys):
    least = memory_for(counted(*on_gpu("train.batch_size=512")).total(64))
    settings = on_gpu("train.batch_size=512", f"resources.per_node.{NODE}.gpu_memory_gib={least!r}")
    assert run_with_gpus("--dry-run", *settings) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if " slices = " in line]
    assert lines[0].startswith("train_first_slice: batch of 512 slices = 1 worker x 512 slices x 1 accumulated")
    assert "(limit: a worker's share; " in lines[0]
    assert lines[1].startswith(f"{NODE}: batch of 512 slices = 1 worker x 64 slices x 8 accumulated (limit: resources.")
    assert lines[1].endswith(" GiB counted)")


def test_a_memory_without_room_for_one_slice_is_refused(run_with_gpus, tmp_path, capsys):
    assert run_with_gpus("--dry-run", *on_gpu("resources.gpu_memory_gib=1")) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: resources.gpu_memory_gib is 1; training first_slice takes 0.0 GiB even with single")
    assert line.count("\n") == 1 and "must be at least 2" in line and list(tmp_path.iterdir()) == []
    with pytest.raises(UserError) as refused:
        stage_batch_plan(load("imagenet64", ["resources.gpu_memory_gib=4"]), STAGE)
    least = int(str(refused.value).rsplit(" ", 1)[1])
    assert stage_batch_plan(load("imagenet64", [f"resources.gpu_memory_gib={least}"]), STAGE).micro_batch_size >= 1
    with pytest.raises(UserError, match=f"at least {least}"):
        stage_batch_plan(load("imagenet64", [f"resources.gpu_memory_gib={least - 1}"]), STAGE)


def test_what_does_not_train_counts_nothing(run_with_gpus, monkeypatch, capsys):
    """Counting the networks of a preset takes seconds."""

    def counts(*_: object) -> None:
        raise AssertionError("counted")

    monkeypatch.setattr(pipeline, "stage_batch_plan", counts)
    assert run_with_gpus("--status", *on_gpu("resources.gpu_memory_gib=1")) == 0
    assert run_with_gpus("--gc", *on_gpu("resources.gpu_memory_gib=1")) == 0
    assert NODE in capsys.readouterr().out
    nodes(load("debug", on_gpu("resources.gpu_memory_gib=1")), to_run=["prepare_data", "evaluate"])
    with pytest.raises(SystemExit, match="would have run"):
        run_with_gpus("--only", "prepare_data", *on_gpu("resources.gpu_memory_gib=1"))


def test_a_stage_that_does_not_fit_keeps_no_other_from_training():
    config = load("debug", on_gpu(f"resources.per_node.{NODE}.gpu_memory_gib=1"))
    plans = {node.name: node.options.get("plan") for node in nodes(config, to_run=["train_first_slice"])}
    assert isinstance(plans["train_first_slice"], BatchPlan) and plans[NODE] is None
    with pytest.raises(UserError, match=STAGE):
        nodes(config)


PLAN = BatchPlan(512, 2, 64, 4, counted_bytes=30 * GIB)


def test_the_refusal_says_what_where_and_what_to_choose():
    assert PLAN.refusal(30 * GIB, stage=STAGE) is None
    assert PLAN.refusal(24 * GIB - 5, stage=STAGE) == (
        "resources.gpu_memory_gib: training size_upscale in micro-batches of 64 slices takes 30.0 GiB, of a GPU with "
        "24.0; for smaller ones: resources.gpu_memory_gib=23"
    )
    half = BatchPlan(512, 2, 64, 4, counted_bytes=30 * GIB, gpu_part=0.5)
    assert half.refusal(60 * GIB, stage=STAGE) is None and "0.5 of a GPU" in half.refusal(59 * GIB, stage=STAGE)
    assert BatchPlan(512, 2, 64, 4).refusal(1, stage=STAGE) is None, "on a CPU nothing was counted"


def test_a_machine_with_smaller_gpus_is_told_before_anything_is_written(run_with_gpus, tmp_path, monkeypatch, capsys):
    # A GPU of two GiB is configured, each network takes some thousandths of one.
    settings = on_gpu("resources.gpu_memory_gib=2", "sample.batch_size=null")
    for memory in (None, GIB):
        monkeypatch.setattr(start, "largest_gpu_bytes", lambda memory=memory: memory)
        with pytest.raises(SystemExit, match="would have run"):
            run_with_gpus(*settings)
    monkeypatch.setattr(start, "largest_gpu_bytes", lambda: 2**20)
    capsys.readouterr()
    assert run_with_gpus(*settings) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: resources.gpu_memory_gib: training first_slice in micro-batches of 8 slices takes")
    assert line.count("\n") == 1 and list(tmp_path.iterdir()) == []


def test_a_worker_refuses_a_gpu_that_is_too_small(monkeypatch):
    """Before it makes a network: on a cluster nobody else knows the machine."""
    total = SimpleNamespace(total_memory=24 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: total)
    with pytest.raises(UserError, match="takes 30.0 GiB, of a GPU with 24.0"):
        check_memory(PLAN, torch.device("cuda", 0), stage=STAGE)
    check_memory(PLAN, torch.device("cpu"), stage=STAGE)
    total.total_memory = math.ceil(30 * GIB)
    check_memory(PLAN, torch.device("cuda", 0), stage=STAGE)


def test_training_begins_with_that_check(monkeypatch):
    from pipelines.nodes import ray_train

    def stop(plan: BatchPlan, device: torch.device, *, stage: str) -> None:
        raise UserError(f"{stage}: {plan.micro_batch_size}")

    monkeypatch.setattr(ray_train, "check_memory", stop)
    monkeypatch.setattr(ray_train, "get_device", lambda: torch.device("cpu"))
    worker = SimpleNamespace(get_world_rank=lambda: 0, get_world_size=lambda: 1)
    monkeypatch.setattr(ray_train.ray.train, "get_context", lambda: worker)
    monkeypatch.setattr(ray_train, "SPN", lambda config: pytest.fail("a network was made"))
    config = load("debug")
    settings = {"num_threads": 1, "model": stage_model_config(config, STAGE), "train": config.train, "plan": PLAN}
    with pytest.raises(UserError, match="size_upscale: 64"):
        ray_train.train_worker(settings)
