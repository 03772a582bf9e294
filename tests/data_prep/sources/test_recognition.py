"""What a source is taken for, and where its splits come from: by evidence that explains all of its images.

pytest tests/data_prep/sources/test_recognition.py
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import tarfile
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data_prep import sources
from data_prep.plan import make_plan
from data_prep.sources import Source, Unplannable
from tests.data_prep import made
from tests.data_prep.made import config, encoded


def write(root: pathlib.Path, *paths: str, side: int = 8) -> pathlib.Path:
    image = encoded(Image.new("RGB", (side, side)))
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(b"" if path.endswith((".txt", ".json")) else image)
    return root


def write_tar(path: pathlib.Path, *names: str) -> None:
    made.write(path, made.tar_of([(name, b"1") for name in names]))


def write_table(path: pathlib.Path, *columns: str, num_rows: int = 2, kind: pa.DataType | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = kind or made.IMAGE
    value = {"bytes": b"xxxxxxxx", "path": None} if pa.types.is_struct(kind) else b"xxxxxxxx"
    pq.write_table(pa.table({name: pa.array([value] * num_rows, kind) for name in columns}), path)


def paths(*parts: str) -> list[str]:
    """paths("train test", "cat dog", "0.png") -> train/cat/0.png, ..."""
    return ["/".join(each) for each in itertools.product(*(part.split() for part in parts))]


def splits(found: Source) -> dict[str | None, int]:
    return dict(Counter(item.split for item in found.items))


@pytest.mark.parametrize(
    ("files", "name", "expected"),
    [
        (paths("train val test", "cat dog wild", "0.png 1.png"), "folder", {"train": 6, "valid": 6, "test": 6}),
        (paths("train test", "cat dog", "0.png"), "folder", {"train": 2, "test": 2}),
        (paths("x", "Training Validation", "a b", "0.jpg"), "folder", {"train": 2, "valid": 2}),
        (paths("train testing valid", "0.png"), "folder", {"train": 1, "test": 1, "valid": 1}),
        (paths("images", "train2017 val2017", "0.png"), "folder", {"train": 1, "valid": 1}),
        (paths("trainA trainB testA", "0.png"), "folder", {"train": 2, "test": 1}),
        (paths("train.X1 train.X2 val.X", "n01440764 n02085620", "0.JPEG"), "folder", {"train": 4, "valid": 2}),
        (paths("tiny/train", "n01440764", "images", "0.JPEG") + ["tiny/val/images/val_0.JPEG"], "folder", None),
        (paths("celeba_hq afhq", "train val", "cat", "1.png"), "folder", {"train": 2, "valid": 2}),
        (paths("data256x256", "train test", "1.png"), "folder", {"train": 1, "test": 1}),
        (["train_0.png", "train_1.png", "test_0.png"], "folder", {"train": 2, "test": 1}),
        (["train_ride.png", "test.png", "b.png"], "folder", {None: 3}),
        (paths("cat dog test", "0.png"), "folder", {None: 3}),
        (paths("bus car train", "0.png"), "folder", {None: 3}),
        (paths("train", "a b", "0.png"), "folder", {"train": 2}),
        (paths("train val", "n99999999 n01440764", "0.JPEG"), "ilsvrc_folder", {"train": 2, "test": 2}),
        (paths("train val test", "n01440764", "0.JPEG"), "folder", {"train": 1, "valid": 1, "test": 1}),
        (paths("train", "n01440764", "0.JPEG") + ["val/a.JPEG", "test/b.JPEG"], "folder", None),
        (paths("n01440764 n02085620", "0.JPEG"), "folder", {None: 2}),
        (["CelebA-HQ-img/0.jpg", "CelebA-HQ-img/1.jpg", "faces/a.jpg"], "folder", {None: 3}),
        (["CelebAMask-HQ-mask-anno/0/00000_hair.png", *paths("CelebA-HQ-img", "0.jpg 1.jpg")], "celebahq", {None: 2}),
        (["train_64x64/0.png", "valid_64x64/1.png", "test_64x64/1.png"], "folder", None),
    ],
)
def test_layouts_of_images(tmp_path: pathlib.Path, files: list[str], name: str, expected: dict | None):
    found = sources.find(config(write(tmp_path, *files)))
    expected = expected or {"train": 1, "valid": 1} | ({"test": 1} if len(files) == 3 else {})
    assert (found.name, splits(found)) == (name, expected)
    assert sum(expected.values()) + sum(found.skipped.values()) == len(files)
    told = config(tmp_path, split="by_photo", num_test_photos=1)
    shards = make_plan(told, sources.find(told)).shards
    assert [(shard.split, len(shard.rows)) for shard in shards if shard.split != "train"] == [("test", 1)]


def test_images_outside_of_the_splits_are_few_or_an_error(tmp_path: pathlib.Path):
    write(tmp_path, *(f"{split}/{i}.png" for split in ("train", "test") for i in range(60)), "logo.png")
    found = sources.find(config(tmp_path))
    assert (splits(found), found.skipped) == ({"train": 60, "test": 60}, {"in_no_split": 1})
    write(tmp_path, "extra/0.png")
    with pytest.raises(Unplannable, match=r"^split is 'auto'; 2 of 122 files are in no split.*extra.*split=by_photo"):
        sources.find(config(tmp_path))
    assert len(sources.find(config(tmp_path, split="by_photo")).items) == 122


def test_the_build_says_where_the_splits_come_from(tmp_path: pathlib.Path):
    def said(*files: str, **changes: object) -> str:
        told = config(write(tmp_path / str(len(list(tmp_path.iterdir()))), *files), **changes)
        return make_plan(told, sources.find(told)).splits

    own = ["train/0.png", "train/1.png", "test/0.png"]
    assert said(*own, num_valid_photos=1).startswith("the source's own test; num_*_photos apply to others only")
    assert said(*own, split="by_photo") == "by split=by_photo, not the source's own"
    assert said("a/0.png") == "drawn by the seed"
    assert "drawn by the seed, not by a/test/0.png (splits are folders or" in said("a/test/0.png", "a/b/0.png")
    assert "not by train_test_split.txt (" in said("a.png", "train_test_split.txt")
    assert "not by split.json (" in said("a.png", "split.json")


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        ({"train.txt": "a/0.png\na/1.png\n", "test.txt": "b/2.png\n"}, {"train": 2, "test": 1}),
        ({"meta/train.lst": "\ufeff0 7\r\n1 8\r\n", "meta/val.lst": "2 9\r\n"}, {"train": 2, "valid": 1}),
        ({"train.csv": 'file,label\n"0.png",x y\n1.png,z\n', "valid.csv": "file\n2.png\n"}, {"train": 2, "valid": 1}),
        ({"cat_train.txt": "0 1\n1 -1\n", "dog_train.txt": "0\n1\n", "dog_val.txt": "2\n"}, {"train": 2, "valid": 1}),
        ({"train.txt": "0\n1\n", "test.txt": "1\n2\n"}, {None: 3}),
        ({"train.txt": "0\n", "test.txt": "2\n"}, {None: 3}),
        ({"train.txt": "0\n1\n", "test.txt": "2\n3\n"}, {None: 3}),
        ({"train.txt": "0\n1\n2\n", "trainval.txt": "0\n"}, {None: 3}),
        ({"train.txt": "0\n1\n", "test.txt": b"\xff"}, {None: 3}),
    ],
)
def test_lists_are_splits_if_they_name_every_image_once(tmp_path: pathlib.Path, lists: dict, expected: dict):
    write(tmp_path, "a/0.png", "a/1.png", "b/2.png")
    for name, text in lists.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    found = sources.find(config(tmp_path))
    assert splits(found) == expected
    assert ("; splits by" in found.why, found.skipped.get("not_a_data_file", 0)) == (
        (True, 0) if None not in expected else (False, len(lists))
    )
    before = sources.identify(config(tmp_path))
    (tmp_path / next(iter(lists))).write_text("")
    assert sources.identify(config(tmp_path)) != before


def test_images_whose_names_do_not_say_so_are_no_silent_loss(tmp_path: pathlib.Path):
    write(tmp_path, "a.png", "b", "c.png_large", "notes.txt")
    (tmp_path / "notes.txt").write_text("II. Text")
    with pytest.raises(Unplannable, match="2 files such as b are images whose names do not say so: rename them"):
        sources.find(config(tmp_path))
    assert sources.find(config(tmp_path, source="folder")).skipped == {"not_a_data_file": 3}
    (tmp_path / "a.png").unlink()
    with pytest.raises(Unplannable, match="; it has 1 without a suffix.*: b is an image: rename such files"):
        sources.find(config(tmp_path))


def test_archives_and_images_side_by_side(tmp_path: pathlib.Path):
    write_tar(tmp_path / "photos.tar", *(f"{i}.jpg" for i in range(100)))
    write(tmp_path, "preview.png")
    found = sources.find(config(tmp_path))
    assert (found.name, len(found.items), found.skipped) == ("webdataset", 100, {"other_image": 1})
    assert found.why.endswith("; left out: preview.png")
    write(tmp_path, "a/0.png")
    with pytest.raises(
        Unplannable, match="^source is 'auto'; 2 of 102 images .* a/0.png: set data.source=webdataset or"
    ):
        sources.find(config(tmp_path))
    assert len(sources.find(config(tmp_path, source="folder")).items) == 2
    write_table(tmp_path / "train.parquet", "image")
    with pytest.raises(Unplannable, match="may be hf_parquet .*; webdataset .*: set data.source"):
        sources.find(config(tmp_path))


def test_archives_without_images_are_named_and_left_out(tmp_path: pathlib.Path):
    for split in ("train", "val"):
        write_tar(tmp_path / "tars" / f"{split}.TAR", "0.jpg", "0.cls", "1.jpg")
        write_table(tmp_path / "tables" / f"{split}.parquet", "image")
    write_tar(tmp_path / "tars" / "annotations.tar", *(f"{i}.xml" for i in range(20)))
    pq.write_table(pa.table({"caption": ["x"]}), tmp_path / "tables" / "metadata.parquet")
    for kind, name in (("tars", "annotations.tar"), ("tables", "metadata.parquet")):
        found = sources.find(config(tmp_path / kind))
        assert (splits(found), found.skipped) == ({"train": 2, "valid": 2}, {"other_archive": 1})
        assert found.why.endswith(f"; no images in {name}")
        for path in (tmp_path / kind).glob("[tv]*"):
            path.unlink()
    with pytest.raises(Unplannable, match="it has 1 .tar: unpack"):
        sources.find(config(tmp_path / "tars"))
    with pytest.raises(Unplannable, match="webdataset finds no usable image in it: 20 missing_image"):
        sources.find(config(tmp_path / "tars", source="webdataset"))


def test_the_archive_of_task_3_is_named_and_left_out(tmp_path: pathlib.Path):
    write_tar(tmp_path / "ILSVRC2012_img_train.tar", "n01440764/a.JPEG")
    (tmp_path / "ILSVRC2012_img_train_t3.tar").write_bytes(b"not even a tar")
    found = sources.find(config(tmp_path))
    assert (found.name, len(found.items), found.skipped) == ("ilsvrc_tar", 1, {"other_archive": 1})
    assert found.why == "it has ILSVRC2012_img_train.tar; left out: ILSVRC2012_img_train_t3.tar"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            ["a.zip", "b.zip", "c.txt"],
            "it has 2 .zip, 1 .txt: unpack archives, and write what other files hold as JPEG",
        ),
        (["x.tfrecord-00000-of-00001", "y.MOV"], "it has 1 .tfrecord, 1 .mov: unpack"),
        ([], "it is empty"),
    ],
)
def test_a_folder_without_images_is_described(tmp_path: pathlib.Path, files: list[str], message: str):
    for name in files:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(Unplannable, match=f"no images .*; {message}"):
        sources.find(config(tmp_path))


def test_a_loop_of_links_is_named_at_once(tmp_path: pathlib.Path):
    root = write(tmp_path / "root", "a/0.png", "b/1.png")
    (tmp_path / "linked").symlink_to(root / "a")
    (root / "again").symlink_to(tmp_path / "linked")
    assert len(sources.find(config(root)).items) == 3  # a folder that is there twice is no loop
    for place, target in [("a/up", root), ("b/c", root / "b"), ("a/out", tmp_path), (".hidden", root)]:
        (root / place).symlink_to(target)
        with pytest.raises(Unplannable, match=f"{place} is a link to a folder that it lies in"):
            sources.find(config(root))
        (root / place).unlink()
    (root / "a" / "to_b").symlink_to(root / "b")
    (root / "b" / "to_a").symlink_to(root / "a")
    with pytest.raises(Unplannable, match="a/to_b/to_a is a link to a folder that it lies in"):
        sources.find(config(root))


# ---- samples with several images -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "kept", "note"),
    [
        (["{}.jpg", "{}.seg.png", "{}.cls"], ["0.jpg", "1.jpg"], "; of jpg, seg.png in a sample, jpg is used"),
        (["{}.seg.png", "{}.JPG", "{}.depth.png", "{}.json"], ["0.JPG", "1.JPG"], "jpg is used"),
        (["{}.image.png", "{}.json"], ["0.image.png", "1.image.png"], ""),
        (["a.b{}.jpg", "a.b{}.cls"], ["a.b0.jpg", "a.b1.jpg"], ""),
        (["img.000{}.jpg", "img.000{}.seg.png"], ["img.0000.jpg", "img.0001.jpg"], "jpg is used"),
        (["v1.{}.jpg", "v1.{}.cls"], ["v1.0.jpg", "v1.1.jpg"], ""),
        (["d.ir/{}.jpg", "d.ir/{}.cls"], ["d.ir/0.jpg", "d.ir/1.jpg"], ""),
    ],
)
def test_one_image_of_each_sample(tmp_path: pathlib.Path, names: list[str], kept: list[str], note: str):
    write_tar(tmp_path / "data-000000.tar", *(name.format(i) for i in range(2) for name in names))
    found = sources.find(config(tmp_path))
    with tarfile.open(tmp_path / "data-000000.tar") as tar:
        name_at = {member.offset_data: member.name for member in tar}
    assert [name_at[item.offset] for item in found.items] == kept and not found.rejected
    assert note in found.why and bool(note) == ("is used" in found.why)


@pytest.mark.parametrize("names", [["{}.jpg", "{}.png"], ["{}.left.jpg", "{}.right.jpg"], ["{}.a.jpg", "{}.b.jpg"]])
def test_equal_images_of_a_sample_need_a_choice(tmp_path: pathlib.Path, names: list[str]):
    write_tar(tmp_path / "data.tar", *(name.format(f"{i:04d}") for i in range(9) for name in [*names, "{}.json"]))
    fields = [name[3:] for name in names]
    with pytest.raises(Unplannable, match=f"^image_field is None; the images of a sample are {', '.join(fields)}: set"):
        sources.find(config(tmp_path))
    found = sources.find(config(tmp_path, image_field=fields[1]))
    assert len(found.items) == found.skipped["other_image_of_a_sample"] == 9
    with pytest.raises(Unplannable, match="^image_field is 'x'; the images of a sample are"):
        sources.find(config(tmp_path, image_field="x"))


def test_columns_of_images(tmp_path: pathlib.Path):
    write_table(tmp_path / "train.parquet", "mask", "image")
    found = sources.find(config(tmp_path))
    assert {item.column for item in found.items} == {"image"}
    assert found.why.endswith("; of the columns mask, image, image is used")
    assert {item.column for item in sources.find(config(tmp_path, image_field="mask")).items} == {"mask"}
    write_table(tmp_path / "train.parquet", "photo", "sketch")
    with pytest.raises(Unplannable, match="image_field is None; train.parquet has the images photo, sketch: set"):
        sources.find(config(tmp_path))
    write_table(tmp_path / "train.parquet", "picture", kind=pa.binary())
    found = sources.find(config(tmp_path))
    with sources.Reader(found.name, found.root) as reader:
        assert reader.read(found.items[1]) == b"xxxxxxxx"
    pq.write_table(pa.table({"a": ["x"]}), tmp_path / "train.parquet")
    with pytest.raises(ValueError, match="missing_column: train.parquet has no column of images.*among a"):
        sources.find(dataclasses.replace(config(tmp_path), source="hf_parquet"))


# ---- names of shards -----------------------------------------------------------------------------------------------


def test_shards_of_hugging_face(tmp_path: pathlib.Path):
    names = ("train-00000-of-00002-2f8f6bfa852eac4b", "train-00001-of-00002-2173151d8cd6c7fb")
    for name in (*names, "test-00000-of-00001-42a2661d12c73e48"):
        write_table(tmp_path / "hashed" / "data" / f"{name}.parquet", "image")
    assert splits(sources.find(config(tmp_path / "hashed"))) == {"train": 4, "test": 2}
    write_table(tmp_path / "hashed" / "data" / "train-00001-of-00002-0000000000000000.parquet", "image")
    with pytest.raises(ValueError, match="duplicate_file: number 1 of data/train-.* more than once"):
        sources.find(config(tmp_path / "hashed"))
    for name in paths("default", "train validation partial-test", "0000.parquet"):
        write_table(tmp_path / "converted" / name, "image")
    assert splits(sources.find(config(tmp_path / "converted"))) == {"train": 2, "valid": 2, "test": 2}
    write_table(tmp_path / "alone" / "validation.parquet", "image")
    assert splits(sources.find(config(tmp_path / "alone", dataset="imagenet_area-part"))) == {"test": 2}
