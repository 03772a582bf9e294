"""Each damaged or hostile file is treated as written down: what is done, and the reason code.

pytest tests/data_prep/sources/test_bad_inputs.py
"""

from __future__ import annotations

import json
import pathlib
import shutil
from collections import Counter
from collections.abc import Callable

import pytest

from data_prep import sources
from data_prep.config import DataConfig
from data_prep.plan import Plan, make_plan
from data_prep.sources import UnusableSource
from tests.data_prep import made

FOLDER = pathlib.Path(__file__).parents[3].parent / "shared" / "bad_inputs"
CASES = json.loads((FOLDER / "expected.json").read_text())["cases"] if FOLDER.is_dir() else []

LABELS = {"missing_label", "bad_label", "label_count_mismatch"}  # no model uses labels, so they stop nothing

# Names under which a source's reader looks for its files; what is not here keeps its name.
NAMES = {
    "train_ok.tar": "ILSVRC2012_img_train.tar",
    "train_traversal.tar": "ILSVRC2012_img_train.tar",
    "train_duplicates.tar": "ILSVRC2012_img_train.tar",
    "train_truncated.tar": "ILSVRC2012_img_train.tar",
    "not_a_tar.tar": "ILSVRC2012_img_train.tar",
    "val_labels_short.txt": "imagenet_2012_validation_synset_labels.txt",
    "evil_train_data_batch_1": "train_data_batch_1",
    "object_array.npz": "train_data_batch_1.npz",
    "imagenet32_ok.npz": "train_data_batch_1.npz",
    "imagenet32_badshape.npz": "train_data_batch_1.npz",
}


def prepared(case: dict, root: pathlib.Path) -> DataConfig:
    """A source with nothing but the case, and a config that builds all of it."""
    root.mkdir()
    shutil.copy(FOLDER / case["file"], root / NAMES.get(case["file"], case["file"]))
    dataset = "imagenet_box-part" if "data_batch_1" in NAMES.get(case["file"], "") else "cases"
    if case["action"] == "skip":
        shutil.copy(FOLDER / "ok_baseline.JPEG", root)
    if case["file"] == "val_labels_short.txt":
        val = [(f"ILSVRC2012_val_{i:08d}.JPEG", (FOLDER / "ok_baseline.JPEG").read_bytes()) for i in (1, 2)]
        made.write(root / "ILSVRC2012_img_val.tar", made.tar_of(val))
    options = dict(image_size=32, resolutions=[32], max_quarantine_fraction=1, exif="ignore")
    return made.config(root, dataset=dataset, **options)


def outcome(plan: Plan, sidecars: list[dict]) -> tuple[int, Counter, Counter]:
    """(rows, conversions, quarantine by reason) of all shards."""
    records = plan.rejected + plan.quarantine + [record for found in sidecars for record in found["quarantine"]]
    conversions = sum((Counter(found["conversions"]) for found in sidecars), Counter())
    reasons = Counter(record["reason"] for record in records)
    return sum(found["num_rows"] for found in sidecars), conversions, reasons


@pytest.mark.parametrize("case", CASES or [None], ids=[case["file"] for case in CASES] or ["absent"])
def test_case_gets_its_action_and_reason(case: dict | None, tmp_path: pathlib.Path, written: Callable):
    if case is None:
        pytest.skip("the folder with damaged files is not here")
    config = prepared(case, tmp_path / "raw")
    if case["action"] == "abort" and case["reason"] not in LABELS:
        with pytest.raises(UnusableSource) as error:
            make_plan(config, sources.find(config))
        assert error.value.reason == case["reason"]
        return
    rows, conversions, reasons = outcome(*written(config, tmp_path / "set"))
    expect = case.get("expect", {})
    if case["action"] in ("accept", "convert"):
        assert rows >= 1 and not reasons
        assert case["reason"] is None or conversions[case["reason"]] == rows
    elif case["action"] == "skip":
        assert rows == 1 and not reasons
        assert sources.find(config).skipped == {case["reason"]: 1}
    elif case["reason"] in LABELS:
        assert rows == 2 and not reasons
    elif expect:
        quarantined = {reason: count for reason, count in expect["quarantined"].items() if reason not in LABELS}
        assert rows == expect["accepted"] + sum(expect["quarantined"].values()) - sum(quarantined.values())
        assert reasons == quarantined
    else:
        assert rows == 0 and reasons == {case["reason"]: 1}
