"""Versions and aliases in the model registry.  python -m pytest tests/pipelines/tracking/test_registry.py"""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mlflow.models import get_model_info

from data_prep.files import open_store
from pipelines import tracking
from pipelines.nodes.registry import (
    CANDIDATE,
    CHAMPION,
    FIRST_GIVEN,
    StageModel,
    _reachable,
    add_version,
    attempts_with_alias,
    judge,
    register,
)
from pipelines.tracking import Ledger, default_uri

FIRST = StageModel(
    stage="size_upscale",
    checkpoint="s3://key:secret@bucket/runs/step-00000010?session_token=secret",
    attempt="1",
    test_bits_per_dim=0.5,
    standard_error=0.1443,
    test_set="aaaa",
    scored_dims="64px S=2 bits 0+3",
    scores="/nowhere/e1/per_image.parquet",
)


def scored(folder: Path, attempt: str, scores: list[float], *, stage: str = "size_upscale") -> str:
    """The file of an `evaluate`."""
    file = folder / attempt / "per_image.parquet"
    file.parent.mkdir()
    pq.write_table(pa.table({"key": list("cab")[: len(scores)], stage: scores}), file)
    return str(file)


@pytest.mark.parametrize(
    ("changes", "moves", "why"),
    [
        ({"scores": [0.8, 0.28, 0.36]}, True, "champion: this version gains 0.020000"),  # two errors: 0.011547
        ({"scores": [0.8, 0.28, 0.40]}, False, "champion stays: this version gains 0.006667"),  # 0.013333
        ({"scores": [0.9, 0.4, 0.5]}, False, "champion stays: this version gains -0.1"),
        ({"scores": "/nowhere/e2/per_image.parquet"}, False, "champion stays: the scores per image cannot be compared"),
        ({"scores": [0.1]}, False, "champion stays: the scores per image cannot be compared"),
        ({"scores": "ftp://x/y.parquet"}, False, "champion stays: the scores per image cannot be compared"),
        ({"test_set": "bbbb"}, False, "not compared: the champion's test_set is aaaa"),
        (
            {"test_bits_per_dim": 0.1, "scored_dims": "64px S=2 bits 0+8"},
            False,
            "not compared: the champion's scored_dims",
        ),
    ],
)
def test_the_champion_moves_for_a_gain_beyond_two_standard_errors_on_the_same_images(
    changes: dict[str, Any], moves: bool, why: str, tmp_path: Path
) -> None:
    """The spread of the images, which is far larger than the gain, does not count."""
    champion = dataclasses.replace(FIRST, attempt="0", scores=scored(tmp_path, "e1", [0.82, 0.31, 0.37]))
    if isinstance(changes.get("scores"), list):
        changes = changes | {"scores": scored(tmp_path, "e2", changes["scores"])}
    moved, reason = judge(dataclasses.replace(champion, attempt="1", **changes), dataclasses.asdict(champion))
    assert moved == moves and why in reason


def test_a_champion_in_the_same_bucket_is_read_with_the_same_login_and_options() -> None:
    own = "s3://key:secret@bucket/new/x.parquet?region=eu"
    assert _reachable("s3://bucket/old/x.parquet", own) == "s3://key:secret@bucket/old/x.parquet?region=eu"
    for other in ("s3://elsewhere/x.parquet", "/a b#c?/x.parquet"):
        assert _reachable(other, own) == _reachable(other, "/d#e/x.parquet") == other


@pytest.fixture(scope="module")
def ledger(mlflow_place: Path) -> Ledger:
    uri = default_uri(open_store(mlflow_place), name="demo")
    ledger = Ledger(uri, experiment="demo", run_folder="/runs/registry")
    ledger.start_pipeline(tags={}, params={}, config="")
    return ledger


def holders(ledger: Ledger, stage: str = "size_upscale") -> dict[str, str]:
    aliases = tracking.make_client(ledger.uri).get_registered_model(f"demo.{stage}").aliases
    return {alias: str(version) for alias, version in aliases.items()}


def test_versions_and_aliases_of_three_trainings(
    ledger: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client = tracking.make_client(ledger.uri)
    numbers = itertools.count()

    def train(model: StageModel) -> str:
        model = dataclasses.replace(model, scores=scored(tmp_path, f"e{next(numbers)}", [model.test_bits_per_dim] * 3))
        handle = ledger.start_node("train_size_upscale", tags={}, params={})
        with handle.open() as run:
            register(run, model)
            register(run, model)  # scored again: no second version
        ledger.finish("train_size_upscale", "FINISHED")
        return handle.run_id

    first = train(FIRST)
    worse = train(dataclasses.replace(FIRST, attempt="2", test_bits_per_dim=0.7, checkpoint="/runs/step-10"))
    assert holders(ledger) == {CANDIDATE: "2", CHAMPION: "1"}
    train(dataclasses.replace(FIRST, attempt="3", test_bits_per_dim=0.4))
    assert holders(ledger) == {CANDIDATE: "3", CHAMPION: "3"}
    # The champion itself, scored anew: the next one is compared with that.
    train(dataclasses.replace(FIRST, attempt="3", test_bits_per_dim=0.45))
    assert holders(ledger) == {CANDIDATE: "3", CHAMPION: "3"}
    train(dataclasses.replace(FIRST, attempt="4", test_bits_per_dim=0.42))
    assert holders(ledger) == {CANDIDATE: "4", CHAMPION: "4"}
    client.set_registered_model_alias("demo.size_upscale", "mine", "2")
    assert attempts_with_alias(ledger.uri, experiment="demo") == {"2", "4", "e1", "e4"}
    assert capsys.readouterr().out.count("demo.size_upscale, version 2: champion stays: this version gains -0.2") == 2
    client.delete_registered_model_alias("demo.size_upscale", "mine")

    versions = {v.version: v for v in client.search_model_versions("name = 'demo.size_upscale'")}
    assert [str(v) for v in sorted(map(int, versions))] == ["1", "2", "3", "4"]
    one, two = client.get_model_version("demo.size_upscale", "1"), client.get_model_version("demo.size_upscale", "2")
    assert (one.run_id, two.run_id) == (first, worse)
    assert one.source == one.tags["checkpoint"] == "s3://bucket/runs/step-00000010"  # where it is, and no login
    assert two.source == "/runs/step-10" and two.tags["champion_rule"].startswith("champion stays")
    assert one.tags["test_set"] == "aaaa" and float(one.tags["test_bits_per_dim"]) == 0.5


def test_a_champion_is_fetched_as_the_page_says(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "step-00000010"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    handle = ledger.start_node("train_fetched", tags={}, params={"model": {"image_size": 64}})
    with handle.open() as run:
        scores = scored(tmp_path, "e", [0.25, 0.5, 0.75], stage="fetched")
        dims = FIRST.scored_dims + FIRST_GIVEN
        model = dataclasses.replace(FIRST, stage="fetched", checkpoint=str(checkpoint), scores=scores, scored_dims=dims)
        register(run, model)
    card = tracking.make_client(ledger.uri).get_model_version("demo.fetched", "1").description
    assert (
        "64px S=2 bits 0+3 without slice (0, 0)" in card
        and "first_given=True" in card
        and "0.5000 ± 0.1443 bits/dim" in card
    )
    assert 'download_artifacts("models:/demo.fetched/1")' in card
    info = get_model_info(str(checkpoint))  # what MLflow itself reads there
    assert info.signature.inputs.inputs[0].shape == (-1, 3, 64, 64)
    page = (Path(__file__).parents[3] / "docs/comparing_stages.md").read_text()
    (code,) = re.findall(r'MLFLOW_TRACKING_URI=sqlite:///runs/demo/mlflow.db python -c "(.*)"', page)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", ledger.uri)
    monkeypatch.chdir(tmp_path)
    exec(code.replace("demo.depth_upscale", "demo.fetched"))
    assert Path(capsys.readouterr().out.splitlines()[-1]).samefile(checkpoint)
    assert {path.name for path in tmp_path.iterdir()} == {checkpoint.name, "e"}, "no database was made here"


class BrokenOff:
    """A client that loses its server at the n-th call."""

    def __init__(self, client: Any, calls: int) -> None:
        self._client, self._left = client, calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        if callable(found):
            self._left -= 1
            if self._left < 0:
                raise ConnectionError("away")
        return found


def test_a_registration_that_broke_off_anywhere_is_finished_by_the_next(ledger: Ledger) -> None:
    client = tracking.make_client(ledger.uri)
    handle = ledger.start_node("train_broken", tags={}, params={})
    model = dataclasses.replace(FIRST, stage="broken", attempt="9")
    for calls in range(20):
        try:
            add_version(BrokenOff(client, calls), handle.run_id, model)
            break
        except ConnectionError:
            continue
    assert 5 < calls < 19, "every call was one that broke off"
    assert len(client.search_model_versions("name = 'demo.broken'")) == 1
    assert holders(ledger, "broken") == {CANDIDATE: "1", CHAMPION: "1"}
    ledger.finish("train_broken", "FINISHED")
