"""Overrides on the command line that change nothing, or not for every stage: said, so that nobody waits for an effect.

They are no mistakes: a script may give several commands the same settings. What an override does is found by loading
the config without it and comparing what the command would run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from data_prep.files import UserError
from pipelines import cluster
from pipelines.config import ExperimentConfig, stage_kind, stage_names
from pipelines.dag.fingerprint import canonical
from pipelines.loading import key_of, load

if TYPE_CHECKING:
    from pipelines.nodes.images import UserImages


def notes(
    config: ExperimentConfig,
    name_or_path: str,
    overrides: Sequence[str],
    *,
    command: str,
    reads: Callable[[ExperimentConfig], Any],
) -> list[str]:
    """A line per override that does not reach every stage, and one for those without any effect.

    reads: what the command makes of a config, as a value that can be compared. An override that repeats what is set
    anyway is passed over.
    """
    lines, idle = [], []
    now = reads(config) if overrides else None
    for key in dict.fromkeys(map(key_of, overrides)):
        try:
            without = load(name_or_path, [other for other in overrides if key_of(other) != key])
        except UserError:  # needed
            continue
        if without == config or stage_names(without) != stage_names(config):
            continue
        shadowing = _stages_with_their_own(key, config, without, overrides)
        if reads(without) == now and shadowing != stage_names(config):
            idle.append(key)
        elif shadowing:
            lines.append(f"{key} does not reach {', '.join(shadowing)}: per_stage sets it there")
    if idle:
        lines.append(f"{', '.join(idle)} {'has' if len(idle) == 1 else 'have'} no effect on what {command} does")
    return lines


def _stages_with_their_own(
    key: str, config: ExperimentConfig, without: ExperimentConfig, overrides: Sequence[str]
) -> list[str]:
    """Stages for which the config's `per_stage`, not another override, sets what the override sets for all."""
    if key.partition(".")[0] not in ("model", "train"):
        return []
    chosen = set(map(key_of, overrides))
    return [
        stage
        for stage in stage_names(config)
        if config.per_stage[stage] == without.per_stage[stage]
        and chosen.isdisjoint(f"per_stage.{name}.{key}" for name in (stage, stage_kind(stage)))
    ]


def what_runs(config: ExperimentConfig, *, only: Sequence[str], images: UserImages | None) -> Any:
    """The nodes that a command runs, what decides the results of those upstream, and where all of it happens."""
    from pipelines import pipeline

    made = {node.name: node for node in pipeline.nodes(config, images=images, listed=False)}
    needed = list(only or made)
    for name in needed:  # grows on the way
        needed += [upstream for upstream in made[name].needs if upstream not in needed]
    resources = config.resources
    return (
        [made[name] if not only or name in only else canonical(made[name].config) for name in needed],
        (config.images, config.image_bits, config.sample.set_for_images()),
        (config.name, config.storage, config.tracking.uri),
        None if cluster.joins() else (resources.num_cpus, resources.num_gpus),
    )
