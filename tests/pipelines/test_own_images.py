"""The user's own images: what fits is read bit for bit, what does not is answered in one line before anything runs.

python -m pytest tests/pipelines/test_own_images.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep.files import UserError
from pipelines import cli
from pipelines.loading import load
from pipelines.nodes import own_images

DEBUG = "debug"  # 16 x 16, S = 2, bits [3, 8], all three stages


def photo(side: int, *, seed: int = 0, low: int = 0, high: int = 256) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, (side, side, 3), dtype=np.uint8)


def save(path: Path, pixels: np.ndarray | Image.Image, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    (pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)).save(path, **options)
    return path


def config(images: Path | str, *overrides: str, preset: str = DEBUG):
    return load(preset, [f"images={images}", *overrides])


COMPLETE = ("sample.use=complete", "sample.num_given_slices=1")


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
    own = own_images.for_sampling(config(save(tmp_path / "a.png", pixels), *use))
    assert own.keys == ("a",) and own.stages == stages and own.num_bits == 3
    assert np.array_equal(own.values, pixels[None] >> 5)
    assert own.node_names == ["prepare_data", *(f"train_{s}" for s in stages), "sample_images"]


def test_files_of_low_bit_values_are_taken_as_they_are(tmp_path):
    pixels = photo(16, high=8)
    file = save(tmp_path / "a.png", pixels)
    own = own_images.for_sampling(config(file, "sample.use=depth_upscale", "image_bits=3"))
    assert np.array_equal(own.values, pixels[None])


def test_pictures_of_samples_read_back_as_the_values_that_they_show(tmp_path):
    """Values spread over 0 .. 255 for the eye have the same high bits."""
    from pipelines.nodes.pictures import display

    values = photo(16, high=8)
    own = own_images.for_sampling(config(save(tmp_path / "a.png", display(values, num_bits=3)), *COMPLETE))
    assert np.array_equal(own.values[0], values)


def test_a_longer_chain_starts_at_the_depth_of_the_files(tmp_path):
    file, bits = save(tmp_path / "a.png", photo(16, high=8)), ("bits=[1,3,8]", "sample.use=depth_upscale")
    assert own_images.for_sampling(config(file, *bits, "image_bits=3")).stages == ("depth_upscale_8",)
    whole = own_images.for_sampling(config(save(tmp_path / "b.png", photo(16)), *bits))
    assert whole.stages == ("depth_upscale_3", "depth_upscale_8") and whole.num_bits == 1


def test_a_baseline_is_completed_from_its_first_rows(tmp_path):
    file = save(tmp_path / "a.png", photo(16))
    system = ("stages=[baseline]", "bits=[8]", "scaling_factor=1", "sample.use=complete", "sample.num_given_rows=5")
    own = own_images.for_sampling(config(file, *system))
    assert own.num_given == 5 and own.stages == ("baseline",) and np.array_equal(own.values[0], photo(16))


def test_scoring_takes_whole_images_at_the_depth_of_the_last_stage(tmp_path):
    file = save(tmp_path / "a.png", photo(16))
    assert np.array_equal(own_images.for_scoring(config(file)).values[0], photo(16))
    low = own_images.for_scoring(config(file, "bits=[5]", "stages=[size_upscale]"))
    assert low.num_bits == 5 and np.array_equal(low.values[0], photo(16) >> 3)


def test_files_folders_and_patterns(tmp_path, monkeypatch):
    for name in ("a.png", "b.PNG", "deep/c.png", "deep/d.bmp", "notes.txt"):
        file = tmp_path / name
        save(file, photo(16)) if file.suffix != ".txt" else file.write_text("no image")
    save(tmp_path / "odd[1].png", photo(16))

    def found(where: object) -> tuple[str, ...]:
        return own_images.for_scoring(config(f"'{where}'")).keys

    assert found(tmp_path) == ("a.png", "b.PNG", "deep/c.png", "deep/d.bmp", "odd[1].png")
    assert found(tmp_path / "a.png") == ("a.png",)
    assert found(tmp_path / "?.png") == ("a.png",)
    assert found(tmp_path / "d*/*.png") == ("deep/c.png",)
    assert found(tmp_path / "odd[1].png") == ("odd[1].png",)
    monkeypatch.chdir(tmp_path)
    assert found("*.png") == ("a.png", "odd[1].png")
    assert found("deep/c.png") == ("c.png",)


def test_digest_follows_names_and_values(tmp_path):
    one = own_images.for_scoring(config(save(tmp_path / "a.png", photo(16))))
    assert one.digest == own_images.for_scoring(config(tmp_path / "a.png")).digest
    other = own_images.for_scoring(config(save(tmp_path / "a.png", photo(16, seed=1))))
    renamed = own_images.for_scoring(config(save(tmp_path / "b.png", photo(16))))
    assert len({one.digest, other.digest, renamed.digest}) == 3
    assert one.digests == renamed.digests != other.digests


# ---- what does not fit ---------------------------------------------------------------------------------------------


def modes() -> dict[str, Image.Image]:
    rgb = Image.fromarray(photo(16))
    return {
        "is grayscale": rgb.convert("L"),
        "has an alpha channel": rgb.convert("RGBA"),
        "has palette colours": rgb.convert("P"),
        "has 16 bits a channel": Image.fromarray(photo(16)[..., 0].astype(np.uint16) << 8),
    }


@pytest.mark.parametrize("text", list(modes()))
def test_other_modes_are_refused(text, tmp_path):
    file = save(tmp_path / "a.png", modes()[text])
    with pytest.raises(UserError, match=rf"a\.png {text}; ") as error:
        own_images.for_scoring(config(file))
    assert "16x16 images, 8-bit RGB" in str(error.value)


WRONG = {
    "size for scoring": ("evaluate", 15, (), "a.png is 15x15; the model scores 16x16 images, 8-bit RGB"),
    "size for the first slice": (
        "sample",
        16,
        ("sample.use=size_upscale",),
        "a.png is 16x16; sample.use=size_upscale takes 8x8 images: slice (0, 0) of 16x16, 8-bit RGB",
    ),
    "size for depth": (
        "sample",
        8,
        ("sample.use=depth_upscale",),
        "a.png is 8x8; sample.use=depth_upscale takes",
    ),
    "no such depth": (
        "sample",
        16,
        ("sample.use=depth_upscale", "image_bits=5"),
        "image_bits is 5; this chain upscales images of 3 or 8 bits",
    ),
    "depth of a first slice": (
        "sample",
        8,
        ("sample.use=size_upscale", "image_bits=5"),
        "image_bits is 5; the model takes images of 3 bits, or of 8 to be reduced",
    ),
    "low-bit files for a model of 8 bits": (
        "evaluate",
        16,
        ("image_bits=3",),
        "image_bits is 3; the model takes images of 8 bits\n",
    ),
    "values beyond the depth": (
        "sample",
        16,
        ("sample.use=depth_upscale", "image_bits=3"),
        "holds a value of 255; image_bits=3 means 0 to 7",
    ),
    "rows of an SPN": (
        "sample",
        16,
        ("sample.use=complete", "sample.num_given_rows=3"),
        "rows of the image are no beginning of that order",
    ),
    "slices of a baseline": (
        "sample",
        16,
        ("stages=[baseline]", "bits=[8]", "scaling_factor=1", "sample.use=complete", "sample.num_given_slices=1"),
        "a baseline has one slice and generates it row by row",
    ),
    "all slices": (
        "sample",
        16,
        ("sample.use=complete", "sample.num_given_slices=4"),
        "sample.num_given_slices is 4; it can be 1 to 3",
    ),
    "no number of slices": (
        "sample",
        16,
        ("sample.use=complete",),
        "num_given_slices is not set; it can be 1 to 3",
    ),
    "slices where none are asked for": (
        "sample",
        16,
        ("sample.use=depth_upscale", "sample.num_given_slices=1"),
        "sample.num_given_slices is for sample.use=complete",
    ),
    "no stage for it": (
        "sample",
        16,
        ("stages=[size_upscale]", "bits=[8]", "sample.use=depth_upscale"),
        "config debug has no stage depth_upscale",
    ),
    "no use": ("sample", 16, (), "images is set, but sample.use is not"),
    "a misspelt use": ("sample", 16, ("sample.use=size_upscal",), "it must be one of size_upscale, depth_upscale"),
    "a misspelt precision": (
        "sample",
        16,
        ("sample.precision=float16",),
        "sample.precision is 'float16'; it must be one of float32, bfloat16",
    ),
    "another command": ("prepare_data", 16, (), "images is for sample.py, which starts from them, and evaluate.py"),
    "top_p": (
        "sample",
        16,
        ("sample.top_p.depth_upscale=1.5",),
        "top_p.depth_upscale is 1.5; it must be above 0",
    ),
    "top_p of no stage": ("sample", 16, ("sample.top_p.depth=0.9",), "the config has no stage 'depth'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_one_line_and_exit_code_2(name, tmp_path, capsys):
    node, side, overrides, message = WRONG[name]
    pixels = photo(side)
    pixels[0, 0, 0] = 255
    save(tmp_path / "a.png", pixels)
    where = (f"images={tmp_path}/a.png", f"storage={tmp_path}/runs", *overrides)
    assert cli.main(["--config", DEBUG, *where], only=[node]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err, err
    assert out == "" and not (tmp_path / "runs").exists()


def test_a_use_without_images_is_refused(tmp_path, capsys):
    assert cli.main(["--config", DEBUG, "sample.use=complete"], only=["sample"]) == 2
    assert "sample.use is complete, but images is not set" in capsys.readouterr().err


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
            own_images.for_scoring(config(tmp_path / where))


def test_dark_images_and_low_bit_files_are_not_confused(tmp_path):
    """Values of 0 .. 7 read as 8 bits may all become 0: asked back, and either answer is taken; black is black."""
    file = save(tmp_path / "a.png", photo(16, high=8))
    with pytest.raises(UserError, match="say image_bits=3; if it is so dark an image of 8 bits, image_bits=8"):
        own_images.for_sampling(config(file, "sample.use=depth_upscale"))
    for image_bits, expected in ((3, photo(16, high=8)), (8, photo(16, high=8) >> 5)):
        own = own_images.for_sampling(config(file, "sample.use=depth_upscale", f"image_bits={image_bits}"))
        assert np.array_equal(own.values[0], expected)
    black = save(tmp_path / "b.png", np.zeros((16, 16, 3), np.uint8))
    assert not own_images.for_sampling(config(black, "sample.use=depth_upscale")).values.any()


def test_two_files_of_one_name_are_refused(tmp_path):
    save(tmp_path / "a.png", photo(16))
    save(tmp_path / "a.bmp", photo(16))
    with pytest.raises(UserError, match="would both be called a; rename one"):
        own_images.for_sampling(config(tmp_path, "sample.use=depth_upscale"))


def test_networks_that_are_not_trained_are_named(tmp_path, capsys):
    """Own images never start a training: what is missing is said, nothing is run."""
    file = save(tmp_path / "a.png", photo(16))
    arguments = ["--config", DEBUG, f"images={file}", f"storage={tmp_path}/runs"]
    assert cli.main([*arguments, "sample.use=depth_upscale"], only=["sample"]) == 2
    err = capsys.readouterr().err
    assert "error: sample_images: its input train_depth_upscale has no finished output" in err and err.count("\n") == 1
    assert cli.main(arguments, only=["evaluate"]) == 2
    assert "error: score_images: its input train_first_slice has no finished output" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("setting", ["use=depth_upscale", "num_draws=4", "num_given_slices=1", "num_given_rows=1"])
def test_scoring_refuses_what_only_sampling_obeys(setting, tmp_path, capsys):
    file, (key, _, value) = save(tmp_path / "a.png", photo(16)), setting.partition("=")
    arguments = ["--config", DEBUG, f"images={file}", f"storage={tmp_path}/runs", f"sample.{setting}"]
    assert cli.main(arguments, prog="evaluate.py", only=["evaluate"]) == 2
    assert capsys.readouterr().err == (
        f"error: sample.{key} is {value}; it is for sample.py: evaluate.py scores images as they are\n"
    )


@pytest.mark.parametrize("setting", ["sample.num_draws=4", "sample.num_given_rows=1", "image_bits=8"])
def test_settings_of_own_images_need_images(setting):
    key, _, value = setting.partition("=")
    with pytest.raises(UserError, match=f"^{key} is {value}, but images is not set; images=FILE says which images"):
        load(DEBUG, [setting])


def test_what_is_kept_and_drawn_is_said_in_one_line(tmp_path):
    file = save(tmp_path / "a.png", photo(16))
    own = own_images.for_sampling(config(file, *COMPLETE))
    assert own.describe(num_draws=4) == (
        "1 image, 4 draws each: the first slice at 3 bits kept, all else drawn by size_upscale, depth_upscale"
    )
    assert own_images.for_scoring(config(file)).describe(num_draws=4) == "1 image to score at 8 bits a channel"
