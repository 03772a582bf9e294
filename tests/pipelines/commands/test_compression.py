"""compress.py and decompress.py on a finished run: what comes back, what is refused, what damage costs.

python -m pytest tests/pipelines/commands/test_compression.py
"""

from __future__ import annotations

import json
import lzma
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from toy.diamond import seal

from data_prep.files import Store, UserError, open_store
from pipelines import cli, compression, pipeline
from pipelines.compression import MAGIC, Header, pack, unpack
from pipelines.config import stage_model_config, stage_names, train_node
from pipelines.dag.plan import plan
from pipelines.loading import load
from spn.checkpoint import save_checkpoint
from spn.evaluation import bits_per_dim, chain_nats
from spn.model import SPN
from tests.data_prep import made

SIDE = 4
DEBUG = ["data.image_size=4", "data.resolutions=[4]", "sample.batch_size=2"]
RANDOM = np.random.default_rng(0).integers(256, size=(3, SIDE, SIDE, 3), dtype=np.uint8)
TEST = {"b#0": RANDOM[0], "c/./d.jpg": np.zeros_like(RANDOM[0]), "e.png": RANDOM[1]}
NAMES = ["b#0.png", "c/d.jpg.png", "e.png"]  # of the files that come back


def dataset(folder: Path) -> dict[str, bytes]:
    """Files of a finished dataset of one split."""
    made.dataset(folder, {"test": TEST}, resolutions=[SIDE], bits=[8], row_group_rows=2)
    store = open_store(folder)
    return {f"dataset/{file.path}": store.read_bytes(file.path) for file in store.walk()}


@pytest.fixture(scope="module")
def finish(tmp_path_factory: pytest.TempPathFactory, randomised) -> Callable[..., dict[str, SPN]]:
    """finish(storage, *overrides): a run folder whose networks are random; the networks."""

    def run(storage: Path, *overrides: str, seed: int = 0) -> dict[str, SPN]:
        config = load("debug", [*DEBUG, *overrides, f"storage={storage}"])
        files: dict[str, dict[str, bytes]] = {"prepare_data": dataset(tmp_path_factory.mktemp("dataset"))}
        models = {}
        for stage in stage_names(config):
            torch.manual_seed(seed)
            models[stage] = randomised(SPN(stage_model_config(config, stage)), seed).float()
            folder = tmp_path_factory.mktemp("checkpoint")
            save_checkpoint(folder, model=models[stage], ema=models[stage], trainer={})
            files[train_node(stage)] = {f"checkpoint/{file.name}": file.read_bytes() for file in folder.iterdir()}
        store = open_store(storage / "debug")
        seal(plan(pipeline.nodes(config), store, sources=pipeline.SOURCES), files)
        return models

    return run


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory, finish) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    finish(folder)
    return folder


@pytest.fixture
def call(storage: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(script: str, *arguments: object, where: Path = storage) -> tuple[int, str, str]:
        code = cli.main([*map(str, arguments), "--config", "debug", *DEBUG, f"storage={where}"], prog=script)
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def coded(storage: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file of the three test images, in batches of two."""
    file = tmp_path_factory.mktemp("coded") / "test.spnc"
    arguments = ["split=test", f"out={file}", "--config", "debug", *DEBUG, f"storage={storage}"]
    assert cli.main(arguments, prog="compress.py") == 0
    return file.read_bytes()


def pictures(folder: Path) -> dict[str, np.ndarray]:
    return {str(f.relative_to(folder)): np.asarray(Image.open(f)) for f in folder.rglob("*") if f.is_file()}


# ---- what comes back -------------------------------------------------------------------------------------------------


def test_the_test_split_comes_back_under_its_names(call, coded: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(coded)
    code, out, err = call("decompress.py", tmp_path / "file", f"out={tmp_path / 'out'}")
    assert (code, err) == (0, "") and out.endswith(f"3 of 3 images are in {tmp_path / 'out'}\n")
    found = pictures(tmp_path / "out")
    assert sorted(found) == NAMES
    assert all(np.array_equal(found[name], image) for name, image in zip(NAMES, TEST.values(), strict=True))


def test_an_interrupted_command_leaves_nothing_in_its_way(
    call, coded: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stops(*arguments: Any, **_: Any) -> int:
        (target,) = (each for each in arguments if isinstance(each, Store))
        target.write_bytes("image.png", b"half")
        raise KeyboardInterrupt

    (tmp_path / "file").write_bytes(coded)
    for command, word in (("compress", "split=test"), ("decompress", tmp_path / "file")):
        monkeypatch.setattr(compression, command, stops)
        code, _, err = call(f"{command}.py", word, f"out={tmp_path / command}")
        assert (code, err) == (130, "interrupted; the same command starts over\n")
        assert not (tmp_path / command).exists()


SYSTEMS = {
    "baseline": ["stages=[baseline]", "bits=[8]", "scaling_factor=1"],
    "four steps": ["bits=[1,3,8]"],
    "few bits": ["stages=[size_upscale]", "bits=[3]", "image_bits=3"],
}


@pytest.mark.parametrize("system", SYSTEMS)
def test_user_images_come_back_at_the_size_of_their_likelihood(system: str, call, finish, tmp_path: Path) -> None:
    overrides, folder = SYSTEMS[system], tmp_path / "photos/deep"
    own = [word for word in overrides if not word.startswith("image_bits")]
    models = finish(tmp_path / "runs", *own)
    folder.mkdir(parents=True)
    images = RANDOM >> 5 if system == "few bits" else RANDOM
    for number, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{number}.png")
    where, file = tmp_path / "runs", tmp_path / "file"
    code, out, err = call("compress.py", f"images={tmp_path / 'photos'}", f"out={file}", *overrides, where=where)
    assert (code, err) == (0, "") and "3 images in" in out and "decoded again bit for bit" in out
    assert call("decompress.py", file, f"out={tmp_path / 'out'}", *own, where=where)[0] == 0
    found = pictures(tmp_path / "out")
    assert all(np.array_equal(found[f"deep/{n}.png"], image) for n, image in enumerate(images)) and len(found) == 3
    if system == "few bits":
        code, _, err = call("compress.py", f"images={tmp_path / 'photos'}", f"out={tmp_path}/new", *own, where=where)
        assert code == 2 and "image_bits is None; this chain codes 3 bits: image_bits=3" in err
    else:
        nats = sum(chain_nats(models, torch.from_numpy(images).permute(0, 3, 1, 2).long()).values())
        ideal = bits_per_dim(float(nats.sum()), num_images=1, image_size=SIDE) * SIDE**2 * 3 / 8
        data = file.read_bytes()
        streams = sum(unpack(data, name="")[0].lengths)
        assert 0.998 * ideal < streams < 1.002 * ideal + 3 * 12
        assert len(data) - streams < 700  # the header


def test_a_file_is_checked_before_it_is_done(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that differs from the encoder is noticed, unless nobody looks."""
    right = compression.coding.decode

    def wrong(*arguments: Any, **options: Any) -> Iterator[torch.Tensor]:
        return (image ^ 1 for image in right(*arguments, **options))

    monkeypatch.setattr(compression.coding, "decode", wrong)
    code, _, err = call("compress.py", "split=test", f"out={tmp_path / 'file'}")
    assert code == 2 and "do not come back" in err and not (tmp_path / "file").exists()
    code, out, _ = call("compress.py", "split=test", f"out={tmp_path / 'file'}", "--no-check")
    assert code == 0 and "not checked" in out and (tmp_path / "file").exists()


# ---- damage ----------------------------------------------------------------------------------------------------------


def starts_of(data: bytes) -> list[int]:
    lengths = unpack(data, name="")[0].lengths
    return [len(data) - sum(lengths[number:]) for number in range(len(lengths))]


def test_what_is_whole_of_a_damaged_file_is_decoded_and_the_rest_named(call, coded: bytes, tmp_path: Path) -> None:
    first, second, third = starts_of(coded)
    flipped = bytearray(coded)
    flipped[second + 9] ^= 4
    for name, data, lost in (
        ("flipped", bytes(flipped), ["c/d.jpg.png"]),
        ("cut", coded[:-1], ["e.png"]),
        ("half", coded[: first + 6], NAMES),
    ):
        (tmp_path / name).write_bytes(data)
        code, out, err = call("decompress.py", tmp_path / name, f"out={tmp_path / 'of'}-{name}")
        assert err.startswith(f"error: {tmp_path / name} is damaged, or was coded by other code (git commit ")
        assert err.count("\n") == 1 and f"\n{3 - len(lost)} of 3 images are in " in out
        found = pictures(tmp_path / f"of-{name}")
        assert sorted(found) == [name for name in NAMES if name not in lost]
        assert all(np.array_equal(found[n], image) for n, image in zip(NAMES, TEST.values(), strict=True) if n in found)


def test_no_flipped_bit_of_the_beginning_passes(coded: bytes) -> None:
    """Magic, lengths, checksum and header."""
    for position in range(starts_of(coded)[0]):
        data = bytearray(coded)
        data[position] ^= 1 << position % 8
        with pytest.raises(UserError, match=r"^file(: its header is damaged| is not a file that compress.py)"):
            unpack(bytes(data), name="file")
        with pytest.raises(UserError):
            unpack(coded[:position], name="file")


HOSTILE = {
    "up": dict(names=["../a.png", "b", "c"]),
    "absolute": dict(names=["/a.png", "b", "c"]),
    "hidden way": dict(names=["a/../../b", "b", "c"]),
    "twice": dict(names=["a", "a", "c"]),
    "fewer names": dict(names=["a", "b"]),
    "negative": dict(lengths=[5, -5, 5]),
    "no numbers": dict(lengths=["5", "5", "5"]),
    "wide": dict(batch_size=4),
    "wide for many": dict(batch_size=9000, names=[str(n) for n in range(9000)], lengths=[0] * 9000),
    "precision": dict(numerics={"precision": "int1"}),
    "nothing": dict(names=[], lengths=[]),
    "another field": dict(more=1),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_headers_that_nobody_wrote_in_good_faith_are_refused(case: str, coded: bytes) -> None:
    header, _ = unpack(coded, name="file")
    text = lzma.compress(json.dumps({**vars(header), **HOSTILE[case]}).encode())
    with pytest.raises(UserError):
        unpack(MAGIC + struct.pack("<II", len(text), zlib.crc32(text)) + text, name="file")


def test_a_header_that_unfolds_without_end_is_refused(coded: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    header, streams = unpack(coded, name="file")
    monkeypatch.setattr(compression, "MOST_HEADER", 100_000)
    bomb = pack(Header(**{**vars(header), "git_commit": "0" * 10**6}), streams)
    with pytest.raises(UserError, match="its header is damaged"):
        unpack(bomb, name="file")


# ---- another machine, another network, mistakes ----------------------------------------------------------------------


def test_another_machine_is_refused(call, coded: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header, streams = unpack(coded, name="")
    theirs = {**header.numerics, "device": "cuda", "card": "NVIDIA H200", "triton": "3.4"}
    (tmp_path / "file").write_bytes(pack(Header(**{**vars(header), "numerics": theirs}), streams))
    code, _, err = call("decompress.py", tmp_path / "file", f"out={tmp_path / 'out'}")
    assert code == 2 and not (tmp_path / "out").exists() and err.count("\n") == 1
    assert "only with what coded it: device cuda (here cpu), card NVIDIA H200 (here " in err
    assert err.endswith("triton 3.4 (here None)\n")


def test_another_network_is_refused(call, finish, coded: bytes, tmp_path: Path) -> None:
    finish(tmp_path / "runs", seed=1)
    (tmp_path / "file").write_bytes(coded)
    code, _, err = call("decompress.py", tmp_path / "file", f"out={tmp_path / 'out'}", where=tmp_path / "runs")
    assert code == 2 and not (tmp_path / "out").exists()
    lost = f"than {tmp_path / 'runs/debug'} has (first_slice, size_upscale, depth_upscale); --config and name=... or "
    assert lost in err and err.count("\n") == 1


def test_a_network_that_is_outdated_still_decodes(call, finish, storage: Path, coded: bytes, tmp_path: Path) -> None:
    """Whatever the config says now, what it was trained with is in the run folder."""
    (tmp_path / "file").write_bytes(coded)
    arguments = (tmp_path / "file", f"out={tmp_path / 'out'}", "train.learning_rate=1e-4", "seed=7")
    assert call("decompress.py", *arguments)[0] == 0
    code, _, err = call("compress.py", "split=test", f"out={tmp_path / 'new'}", "train.learning_rate=1e-4")
    assert code == 2 and "sample: its input train_first_slice has no finished output for this configuration" in err


MISTAKES = {
    "": "out is missing; out=FILE says where to write",
    "out=NEW": "compress.py takes either images=FILE, FOLDER or 'PATTERN', or split=test",
    "out=NEW split=tset": "compress.py takes either images=",
    "out=NEW split=test images=a.png": "compress.py takes either images=",
    "out=HERE split=test": "HERE exists; remove it or choose another name",
    "out=NEW images=5.png": "5.png is 5x5; the model takes 4x4 images, 8-bit RGB",
    "out=NEW splitt=test": "splitt",
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.items(), ids=[key or "nothing" for key in MISTAKES])
def test_mistakes_are_answered_in_one_line(
    arguments: str, message: str, call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("HERE").touch()
    Image.new("RGB", (5, 5)).save("5.png")
    code, _, err = call("compress.py", *arguments.split())
    assert code == 2 and message in err and err.count("\n") == 1 and not Path("NEW").exists()


def test_mistakes_of_decoding_are_answered_in_one_line(call, coded: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(coded)
    Image.fromarray(RANDOM[0]).save(tmp_path / "a.png")
    for file, out, message in (
        ("nothing", "out", "cannot read"),
        ("a.png", "out", "is not a file that compress.py of this version wrote"),
        ("file", "a.png", "exists; remove it"),
        ("file", "a.png/out", "cannot write to"),
    ):
        code, _, err = call("decompress.py", tmp_path / file, f"out={tmp_path / out}")
        assert code == 2 and message in err and err.count("\n") == 1, err
