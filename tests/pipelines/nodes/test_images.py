"""The user's images: what fits is read bit for bit, what does not is refused in one line before anything runs.

Draws keep what is given, and scores are exact.

python -m pytest tests/pipelines/nodes/test_images.py
"""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path

import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
import toy.context
from PIL import Image

from data_prep import sources
from data_prep.build import write_shard
from data_prep.files import UserError
from data_prep.parquet import pixels
from data_prep.plan import make_plan
from pipelines import cli
from pipelines.config import ExperimentConfig, NodeResources, UserImages
from pipelines.dag.node import NodeContext, NodeOutput
from pipelines.loading import load
from pipelines.nodes import images, sample
from pipelines.nodes.trained import load_stages
from pipelines.pipeline import nodes
from spn.checkpoint import save_checkpoint
from spn.evaluation import chain_nats
from spn.ordering import image_to_slices

PARQUET = "res=8/bits=6"
STAGES = ("first_slice", "size_upscale", "depth_upscale")
DEBUG = "debug"  # 16 x 16, S = 2, bits [3, 8], all three stages


def photo(side: int, *, seed: int = 0, low: int = 0, high: int = 256) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, (side, side, 3), dtype=np.uint8)


def save(path: Path, pixels: np.ndarray | Image.Image, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    (pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)).save(path, **options)
    return path


def config(where: Path | str, *overrides: str, preset: str = DEBUG) -> ExperimentConfig:
    return load(preset, [f"images={where}", *overrides])


DEEPEN = "sample.use=depth_upscale"
COMPLETE = ("sample.use=complete", "sample.num_given=1")
BASELINE = "stages=[baseline] bits=[8] scaling_factor=1"


# ---- what fits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use, side, stages",
    [
        (("sample.use=size_upscale",), 8, ("size_upscale", "depth_upscale")),
        (("sample.use=depth_upscale",), 16, ("depth_upscale",)),
        (COMPLETE, 16, ("size_upscale", "depth_upscale")),
    ],
)
def test_high_bits_of_8_bit_images_are_what_is_given(use, side, stages, tmp_path):
    pixels = photo(side)
    own = images.for_sampling(config(save(tmp_path / "a.png", pixels), *use))
    assert own.keys == ("a",) and own.stages == stages and own.num_bits == 3
    assert np.array_equal(own.values, pixels[None] >> 5)
    described = f"1 image at 3 bits per channel, 4 draws each by {', '.join(stages)}"
    assert own.describe(num_draws=4) == described


def test_photos_of_any_size_are_cropped_and_resized_as_the_dataset_was(tmp_path):
    """A camera's photo, turned by its EXIF orientation: the pixels are those that a build makes of it."""
    raw, exif = tmp_path / "raw", Image.Exif()
    exif[0x0112] = 6
    small = Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8))
    save(raw / "a.jpg", small.resize((400, 300), Image.Resampling.BICUBIC), exif=exif, quality=95)
    for changes in (["data.crop=center"], ["data.crop=squash", "data.profile=accurate"]):
        changes += ["data.tile_size=null", "data.tile_stride=null"]
        data, out = dataclasses.replace(config(raw, *changes).data, root=str(raw), num_valid_photos=0), str(raw) + "set"
        plan = make_plan(dataclasses.replace(data, num_test_photos=0), sources.find(data))
        task, source = {"shard": pickle.dumps(plan.shards[0])}, (plan.source.name, plan.source.root)
        write_shard(task, config=plan.config, source=source, out=out, plan_hash=plan.hash)
        (file,) = Path(out).glob("res=16/bits=8/train-*.parquet")
        expected = pixels(pq.read_table(file, partitioning=None))
        scored = images.for_scoring(config(raw, *changes))
        assert np.array_equal(scored.values, expected)
        assert scored.describe(num_draws=1) == "1 image (1 cropped and resized) to score at 8 bits per channel"
        upscaled = images.for_sampling(config(raw, *changes, "sample.use=size_upscale"))
        assert np.array_equal(upscaled.values, expected[:, ::2, ::2] >> 5)
    tiles = images.for_scoring(config(raw))  # the preset's crop: the central square all the same
    assert tiles.values.shape == (1, 16, 16, 3)


def test_pictures_of_samples_read_back_as_the_values_that_they_show(tmp_path):
    """Values spread over 0 .. 255 for the eye have the same high bits."""
    from pipelines.nodes.pictures import display

    values = photo(16, high=8)
    own = images.for_sampling(config(save(tmp_path / "a.png", display(values, num_bits=3)), *COMPLETE))
    assert np.array_equal(own.values[0], values)


def test_a_longer_chain_starts_at_the_depth_of_the_files(tmp_path):
    file, bits = save(tmp_path / "a.png", photo(16, high=8)), ("bits=[1,3,8]", "sample.use=depth_upscale")
    assert images.for_sampling(config(file, *bits, "image_bits=3")).stages == ("depth_upscale_8",)
    whole = images.for_sampling(config(save(tmp_path / "b.png", photo(16)), *bits))
    assert whole.stages == ("depth_upscale_3", "depth_upscale_8") and whole.num_bits == 1


def test_a_baseline_is_completed_from_its_first_rows(tmp_path):
    file = save(tmp_path / "a.png", photo(16))
    own = images.for_sampling(config(file, *BASELINE.split(), "sample.use=complete", "sample.num_given=5"))
    assert own.stages == ("baseline",) and np.array_equal(own.values[0], photo(16))


def test_scoring_takes_whole_images_at_the_depth_of_the_last_stage(tmp_path):
    file = save(tmp_path / "a.png", photo(16))
    assert np.array_equal(images.for_scoring(config(file)).values[0], photo(16))
    low = images.for_scoring(config(file, "bits=[5]", "stages=[size_upscale]"))
    assert low.num_bits == 5 and np.array_equal(low.values[0], photo(16) >> 3)


def test_files_folders_and_patterns(tmp_path, monkeypatch):
    hidden = ("._a.png", ".ipynb_checkpoints/a-checkpoint.png", "__MACOSX/a.png")
    for name in ("a.png", "b.PNG", "deep/c.png", "deep/d.bmp", "notes.txt", *hidden):
        file = tmp_path / name
        save(file, photo(16)) if file.suffix != ".txt" else file.write_text("no image")
    save(tmp_path / "odd[1].png", photo(16))

    def found(where: object) -> tuple[str, ...]:
        return images.for_scoring(config(str(where))).keys

    assert found(tmp_path) == ("a.png", "b.PNG", "deep/c.png", "deep/d.bmp", "odd[1].png")
    assert found(tmp_path / "a.png") == ("a.png",)
    assert found(tmp_path / "?.png") == ("a.png",)
    assert found(tmp_path / "d*/*.png") == ("deep/c.png",)
    assert found(tmp_path / "odd[1].png") == ("odd[1].png",)
    save(tmp_path / "deep" / "a?[1]" / "e.png", photo(16))
    assert found(tmp_path / "deep" / "a?[1]" / "*.png") == ("a?[1]/e.png",)
    (tmp_path / "deep" / "a?[1]" / "e.png").unlink()
    monkeypatch.chdir(tmp_path)
    assert found("*.png") == ("a.png", "odd[1].png")
    assert found("deep/c.png") == ("c.png",)
    (tmp_path / "deep" / "loop").symlink_to(tmp_path)
    with pytest.raises(UserError, match="^images: .*deep/loop is a link to a folder that it lies in"):
        found(tmp_path)


def test_a_pattern_in_a_bucket_keeps_the_uris_options(tmp_path, monkeypatch):
    save(tmp_path / "a.png", photo(16))
    opened, local = [], images.open_store(tmp_path)
    monkeypatch.setattr(images, "open_store", lambda uri: opened.append(uri) or local)
    _, found = images._matching("s3://bucket/f/*.png?region=x&scheme=http")
    assert [file.path for file in found] == ["a.png"] and opened == ["s3://bucket/f?region=x&scheme=http"]


def test_digest_follows_names_and_values(tmp_path):
    one = images.for_scoring(config(save(tmp_path / "a.png", photo(16))))
    assert one.digest == images.for_scoring(config(tmp_path / "a.png")).digest
    other = images.for_scoring(config(save(tmp_path / "a.png", photo(16, seed=1))))
    renamed = images.for_scoring(config(save(tmp_path / "b.png", photo(16))))
    assert len({one.digest, other.digest, renamed.digest}) == 3
    assert one.digests["a.png"] == renamed.digests["b.png"] != other.digests["a.png"]


# ---- what does not fit ---------------------------------------------------------------------------------------------


def modes() -> dict[str, Image.Image]:
    rgb = Image.fromarray(photo(16))
    return {
        "is grayscale": rgb.convert("L"),
        "has an alpha channel": rgb.convert("RGBA"),
        "has palette colours": rgb.convert("P"),
        "has 16 bits per channel": Image.fromarray(photo(16)[..., 0].astype(np.uint16) << 8),
    }


@pytest.mark.parametrize("text", list(modes()))
def test_other_modes_are_refused(text, tmp_path):
    file = save(tmp_path / "a.png", modes()[text])
    with pytest.raises(UserError, match=rf"a\.png {text}; ") as error:
        images.for_scoring(config(file, "image_fit=exact"))
    assert "16x16 images, 8-bit RGB" in str(error.value)
    assert images.for_scoring(config(file)).values.shape == (1, 16, 16, 3)


WRONG = {  # "node, side of the image, settings": message
    "evaluate 15 image_fit=exact": "a.png is 15x15; the model takes 16x16 images, 8-bit RGB",
    "evaluate 16 image_fit=exakt": "image_fit is 'exakt'; it must be data or exact",
    "evaluate 16 image_bits=3": "image_bits is 3; the model takes images of 8 bits\n",
    f"evaluate 16 {DEEPEN}": "sample.use is depth_upscale; it is for sample.py: evaluate.py scores images as they "
    "are\n",
    "evaluate 16 sample.num_draws=4": "sample.num_draws is 4; it is for sample.py: ",
    "evaluate 16 sample.num_given=1": "sample.num_given is 1; it is for sample.py: ",
    "sample 16 sample.use=size_upscale image_fit=exact": "a.png is 16x16; sample.use=size_upscale takes 8x8 images: "
    "slice (0, 0) of 16x16, 8-bit RGB",
    f"sample 8 {DEEPEN} data.min_side=9": "a.png is 8x8, and data.min_side=9 forbids to enlarge it; "
    "sample.use=depth_upscale takes 16x16 images",
    f"sample 17 {DEEPEN} image_bits=3": "a.png is 17x17; sample",
    f"sample 16 {DEEPEN} image_bits=3": "holds a value of 255; image_bits=3 means 0 to 7",
    f"sample 16 {DEEPEN} image_bits=5": "image_bits is 5; this chain upscales images of 3 or 8 bits",
    "sample 8 sample.use=size_upscale image_bits=5": "image_bits is 5; the model takes images of 3 bits, or of 8 to be "
    "reduced",
    "sample 16 sample.use=complete": "sample.num_given is not set; the first 1 to 3 slices",
    "sample 16 sample.use=complete sample.num_given=4": "sample.num_given is 4; the first 1 to 3 slices of an image "
    "can be given",
    f"sample 16 {BASELINE} sample.use=complete sample.num_given=16": "sample.num_given is 16; the first 1 to 15 rows "
    "of an image can be given",
    f"sample 16 {DEEPEN} sample.num_given=1": "sample.num_given is for sample.use=complete",
    f"sample 16 stages=[size_upscale] bits=[8] {DEEPEN}": "config debug has no stage depth_upscale",
    "sample 16": "images is set, but sample.use is not",
    "prepare_data 16": "images is for sample.py, which starts from them, and evaluate.py",
}


@pytest.mark.parametrize(("wrong", "message"), WRONG.items(), ids=WRONG)
def test_a_mistake_is_one_line_and_exit_code_2(wrong, message, tmp_path, capsys):
    node, side, *settings = wrong.split()
    pixels = photo(int(side))
    pixels[0, 0, 0] = 255
    save(tmp_path / "a.png", pixels)
    where = (f"images={tmp_path}/a.png", f"storage={tmp_path}/runs", *settings)
    assert cli.main(["--config", DEBUG, *where], prog=f"{node}.py") == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err, err
    assert out == "" and not (tmp_path / "runs").exists()


def test_files_that_are_no_images_or_not_there(tmp_path):
    (tmp_path / "broken.png").write_bytes(save(tmp_path / "whole.png", photo(16)).read_bytes()[:-200])
    (tmp_path / "text.png").write_text("hello")
    (tmp_path / "empty").mkdir()
    for where, message in {
        "broken.png": "broken.png cannot be read",
        "text.png": "text.png cannot be read",
        "gone.png": "nothing is at",
        "*.jpg": "nothing is at",
        "empty": "no image",
    }.items():
        with pytest.raises(UserError, match=message):
            images.for_scoring(config(tmp_path / where))


def test_all_images_that_cannot_be_used_are_told_at_once(tmp_path):
    for number in range(5):
        (tmp_path / f"{number}.png").write_text("no image")
    with pytest.raises(UserError, match=r"0.png cannot be read .*1.png .*2.png [^;]*; and 2 more; the model takes"):
        images.for_scoring(config(tmp_path))


def test_an_image_of_the_datasets_size_is_large_enough_whatever_photos_the_dataset_took(tmp_path):
    file = save(tmp_path / "a.png", photo(16))
    found = images.for_sampling(config(file, "sample.use=size_upscale", "data.min_side=64"))
    assert np.array_equal(found.values[0], photo(16)[::2, ::2] >> 5)


def test_dark_images_and_low_bit_files_are_not_confused(tmp_path):
    """Values of 0 .. 7 read as 8 bits may all become 0: asked back, and either answer is taken; black is black."""
    file = save(tmp_path / "a.png", photo(16, high=8))
    with pytest.raises(UserError, match="say image_bits=3; if it is so dark an image of 8 bits, image_bits=8"):
        images.for_sampling(config(file, "sample.use=depth_upscale"))
    for image_bits, expected in ((3, photo(16, high=8)), (8, photo(16, high=8) >> 5)):
        own = images.for_sampling(config(file, "sample.use=depth_upscale", f"image_bits={image_bits}"))
        assert np.array_equal(own.values[0], expected)
    black = save(tmp_path / "b.png", np.zeros((16, 16, 3), np.uint8))
    assert not images.for_sampling(config(black, "sample.use=depth_upscale")).values.any()


def test_a_name_too_long_for_the_files_of_its_draws_is_refused(tmp_path):
    save(tmp_path / f"{'x' * 240}.png", photo(16))
    with pytest.raises(UserError, match="x.png has a name of more than 200 bytes; rename it"):
        images.for_sampling(config(tmp_path, "sample.use=depth_upscale"))


def test_two_files_of_one_name_are_refused(tmp_path):
    save(tmp_path / "a.png", photo(16))
    save(tmp_path / "a.bmp", photo(16))
    with pytest.raises(UserError, match="would both be called a; rename one"):
        images.for_sampling(config(tmp_path, "sample.use=depth_upscale"))


def test_networks_that_are_not_trained_are_named(tmp_path, capsys):
    """User images never start a training: what is missing is said, nothing is run."""
    file = save(tmp_path / "a.png", photo(16))
    arguments = ["--config", DEBUG, f"images={file}", f"storage={tmp_path}/runs"]
    assert cli.main([*arguments, "sample.use=depth_upscale"], prog="sample.py") == 2
    err = capsys.readouterr().err
    assert "error: sample_images: its input train_depth_upscale has no finished output" in err and err.count("\n") == 1
    assert cli.main(arguments, prog="evaluate.py") == 2
    assert "error: score_images: its input train_first_slice has no finished output" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


# ---- what is made of them ------------------------------------------------------------------------------------------


def context(inputs: dict[str, NodeOutput], out: Path, user: UserImages, *settings: str) -> NodeContext:
    """Of the node as the pipeline makes it from the config debug."""
    settings = ("images=given", "sample.num_draws=2", "sample.batch_size=3", "sample.seed=1", *settings)
    node = nodes(load("debug", settings), images=user, listed=False)[-1]
    return toy.context.context(node.name, node.config, out, inputs)


def draws_of(folder: Path) -> dict[str, np.ndarray]:
    """{key: uint8 [8, 8, 3] of 6 bits}."""
    found = {}
    for file in sorted((folder / "user_images" / PARQUET).glob("*.parquet")):
        table = pq.read_table(file, partitioning=None)
        found |= dict(zip(table.column("key").to_pylist(), pixels(table), strict=True))
    return found


@pytest.mark.parametrize("use, side", [("size_upscale", 4), ("depth_upscale", 8), ("complete", 8)])
def test_what_is_given_is_kept_bit_for_bit_in_every_draw(use, side, networks, tmp_path, ray_in_this_process):
    given = np.random.default_rng(0).integers(0, 8, (2, side, side, 3), dtype=np.uint8)
    stages = ("depth_upscale",) if use == "depth_upscale" else ("size_upscale", "depth_upscale")
    own = UserImages("sample_images", ("a", "b"), given, 3, stages)
    settings = [f"sample.use={use}", *(["sample.num_given=2"] if use == "complete" else [])]
    result = images.sample(context(networks, tmp_path, own, *settings))
    assert result.metrics == {"images/sampled": 4, "images/batch_size": 3}
    record = json.loads((tmp_path / "user_images/record.json").read_text())
    assert (record["batch_size"], record["precision"]) == (3, "float32")
    found = draws_of(tmp_path)
    assert list(found) == ["a-00", "a-01", "b-00", "b-01"]
    for key, image in found.items():
        start, high = given["ab".index(key[0])], image >> 3
        if use == "size_upscale":
            assert np.array_equal(high[::2, ::2], start)
        elif use == "depth_upscale":
            assert np.array_equal(high, start)
        else:
            slices = [
                image_to_slices(torch.from_numpy(x.copy()).permute(2, 0, 1)[None], 2)[0, :2] for x in (high, start)
            ]
            assert torch.equal(*slices)
    assert len({image.tobytes() for image in found.values()}) == 4, "every draw is another one"
    folder = tmp_path / "user_images"
    assert Image.open(folder / "grid.png").size == (3 * 8 + 2 * 2, 2 * 8 + 2)
    assert Image.open(folder / "generation.webp").n_frames > 10


def test_first_rows_are_kept_bit_for_bit_by_a_baseline(tiny_spn, tmp_path, ray_in_this_process):
    model = tiny_spn("baseline", seed=0, image_size=8, scaling_factor=1, num_bits=6).float()
    (tmp_path / "checkpoint").mkdir()
    save_checkpoint(tmp_path / "checkpoint", model=model, ema=model, trainer={})
    trained = {"train_baseline": NodeOutput(str(tmp_path), {"checkpoint": "checkpoint"}, "a")}
    given = np.random.default_rng(0).integers(0, 64, (1, 8, 8, 3), dtype=np.uint8)
    own = UserImages("sample_images", ("a",), given, 6, ("baseline",))
    baseline = (*BASELINE.split(), "sample.use=complete", "sample.num_given=3")
    images.sample(context(trained, tmp_path, own, *baseline))
    first, second = draws_of(tmp_path).values()
    assert np.array_equal(first[:3], given[0, :3]) and np.array_equal(second[:3], given[0, :3])
    assert not np.array_equal(first[3:], second[3:]) and not np.array_equal(first[3:], given[0, 3:])


def test_draws_depend_on_the_image_not_on_its_name_or_its_neighbours(networks, tmp_path, ray_in_this_process):
    given = np.random.default_rng(0).integers(0, 8, (2, 8, 8, 3), dtype=np.uint8)
    both = UserImages("sample_images", ("a", "b"), given, 3, ("depth_upscale",))
    alone = UserImages("sample_images", ("other",), given[1:], 3, ("depth_upscale",))
    images.sample(context(networks, tmp_path / "both", both, DEEPEN, "sample.batch_size=1"))
    images.sample(context(networks, tmp_path / "alone", alone, DEEPEN, "sample.batch_size=1", "sample.num_draws=3"))
    pair, single = draws_of(tmp_path / "both"), draws_of(tmp_path / "alone")
    for number in range(2):
        assert np.array_equal(pair[f"b-{number:02d}"], single[f"other-{number:02d}"])
    assert len(single) == 3


def test_scores_are_the_chains_exact_bits_per_dim(networks, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # a GPU in sight is none that was asked for
    values = np.random.default_rng(0).integers(0, 64, (5, 8, 8, 3), dtype=np.uint8)
    own = UserImages("score_images", tuple(f"{n}.png" for n in range(5)), values, 6, tuple(STAGES))
    result = images.score(context(networks, tmp_path, own, "evaluate.batch_size=2"))
    table = pyarrow.csv.read_csv(tmp_path / "user_images/scores.csv").to_pydict()
    assert list(table) == ["key", *STAGES, "total"] and table["key"] == list(own.keys)
    image = torch.from_numpy(values).permute(0, 3, 1, 2).long() << 2
    for stage, nats in chain_nats(load_stages(networks, STAGES, device="cpu"), image).items():
        assert table[stage] == pytest.approx((nats / np.log(2) / (3 * 8 * 8)).tolist(), rel=1e-6)
    sums = [sum(parts) for parts in zip(*(table[s] for s in STAGES), strict=True)]
    assert table["total"] == pytest.approx(sums, rel=1e-9)
    assert result.metrics["user_images/bits_per_dim/total"] == pytest.approx(sum(table["total"]) / 5)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_images_are_drawn_at_the_configured_precision(
    precision: str, networks, tmp_path, ray_in_this_process, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Drawn(Exception):
        """Ends a node where it would draw."""

    def seen(*_: object, **options: object) -> None:
        asked_for.append(options["precision"])
        raise Drawn

    asked_for: list[object] = []
    monkeypatch.setattr(sample, "sample_chain", seen)
    monkeypatch.setattr(sample, "recorded_size", lambda store: 1)
    monkeypatch.setattr(NodeResources, "device", "cpu")
    user = UserImages("sample_images", ("a",), np.zeros((1, 8, 8, 3), np.uint8), 3, ("depth_upscale",))
    with pytest.raises(Drawn):
        images.sample(
            context(networks, tmp_path, user, DEEPEN, f"sample.precision={precision}", "resources.use_gpu=true")
        )
    assert asked_for == [precision]
