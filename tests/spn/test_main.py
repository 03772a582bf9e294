"""From a photo to a picture, in a few steps: python -m spn PHOTO, and the notebook.

python -m pytest tests/spn/test_main.py
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from spn import __main__ as spn_main

DOCS = Path(__file__).parents[2] / "docs"


def test_a_photo_becomes_a_picture(tmp_path, capsys, monkeypatch):
    """Crops of the photo in the top row, drawn ones below; bits/dim and the picture's path are printed."""
    monkeypatch.setattr(spn_main, "NETWORK", dataclasses.replace(spn_main.NETWORK, image_size=16))
    photo = np.random.default_rng(0).integers(256, size=(60, 80, 3), dtype=np.uint8)
    Image.fromarray(photo).save(tmp_path / "photo.png")
    spn_main.main([str(tmp_path / "photo.png"), "--steps", "2", "--out", str(tmp_path / "drawn.png")])
    with Image.open(tmp_path / "drawn.png") as drawn:
        assert drawn.size == (512, 512) and len(set(drawn.convert("L").tobytes())) > 2
    printed = capsys.readouterr().out
    assert "valid/bits_per_dim" in printed and str(tmp_path / "drawn.png") in printed


def test_a_photo_that_cannot_be_read_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # Pillow takes up to twice as many
    (tmp_path / "text.png").write_text("no picture")
    Image.new("RGB", (60, 80)).save(tmp_path / "large.png")
    for name in ("text.png", "nothing.png", "large.png"):
        with pytest.raises(SystemExit, match="2"):
            spn_main.main([str(tmp_path / name)])
        err = capsys.readouterr().err
        assert f"{name} is no picture" in err and err.count("\n") == 1


def test_what_cannot_be_written_is_refused_before_training(tmp_path, capsys):
    Image.new("RGB", (60, 80)).save(tmp_path / "photo.png")
    for words in (
        ("--out", tmp_path / "nowhere/x.png"),
        ("--out", tmp_path / "x.foo"),
        ("--out", tmp_path / "x.psd"),
        ("--out", tmp_path / "x.xbm"),  # of black and white alone
        ("--steps", "0"),
    ):
        with pytest.raises(SystemExit, match="2"):
            spn_main.main([str(tmp_path / "photo.png"), *map(str, words)])
        err = capsys.readouterr().err
        assert err.startswith(f"error: {words[0]} is ") and err.count("\n") == 1


def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    """Every cell, from its folder, with 20 steps and smaller images; its outputs are not stored."""
    cells = json.loads((DOCS / "tutorial.ipynb").read_text())["cells"]
    cells = [cell for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells)
    monkeypatch.chdir(DOCS)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("torch.set_num_threads", lambda number: None)  # other tests share this process
    names: dict[str, Any] = {}
    for cell in cells:
        exec("".join(cell["source"]).replace("num_steps=150", "num_steps=20").replace("3, 32, 4", "3, 16, 4"), names)
    assert names["state"].step == 20 and capsys.readouterr().out.count("bits/dim") == 2
    assert names["drawn"].shape == (4, 3, 16, 16)
    kept = names["image_to_slices"](names["completed"], 4)[:, :8]
    assert (kept == names["image_to_slices"](names["test"][:1], 4)[:, :8]).all()
