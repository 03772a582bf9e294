"""The layouts of raw images that can be read. A file of its own, so that a new layout outdates no finished dataset."""

from __future__ import annotations

LAYOUTS = (  # each is a module of data_prep.sources; `auto` recognises them
    "ilsvrc_tar",
    "ilsvrc_folder",
    "imagenet_oord",
    "imagenet_box",
    "webdataset",
    "hf_parquet",
    "celebahq",
    "cifar10",
    "folder",
)
