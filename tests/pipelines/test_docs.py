"""What the documentation gives to copy can be used.  python -m pytest tests/pipelines/test_docs.py"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipelines import cli
from pipelines.config import stage_model_config, stage_names
from pipelines.inspection import CARD
from pipelines.loading import load
from pipelines.pipeline import nodes

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_configuration_for_own_photos(tmp_path: Path) -> None:
    config = load(str(ROOT / "docs/own_data.yaml"), [])
    assert config.data.root is None and config.data.image_size % config.scaling_factor == 0
    (photos := tmp_path / "photos").mkdir()
    (photos / "photo.jpg").write_bytes(b"")
    arguments = ["--config", str(ROOT / "docs/own_data.yaml"), f"data.root={photos}", f"storage={tmp_path / 'runs'}"]
    assert cli.main([*arguments, "--dry-run"]) == 0
    assert cli.main([*arguments, "--verify"], prog="prepare_data.py") == 2  # nothing is built


def test_overrides_of_the_recipe_page() -> None:
    """The command that turns a preset to recipe modern loads, for every stage."""
    text = (ROOT / "docs/recipes.md").read_text()
    command = re.search(r"--config (\w+) (data\.root=FOLDER.*?)\n\n", text, re.DOTALL)
    overrides = command[2].replace("\\\n", " ").split()
    config = load(command[1], overrides)
    assert len(overrides) > 8 and config.train.optimizer == "muon"
    for stage in stage_names(config):
        found = stage_model_config(config, stage)
        assert {part.recipe for part in (found.decoder, found.embedder) if part} == {"modern"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), target
    for path in re.findall(r"(?<![\w/])((?:spn|pipelines|data_prep|tests|benchmarks|docs)/[\w/]+\.\w+)", text):
        assert (ROOT / path).exists(), path


def test_readme_is_short_and_its_tree_is_the_projects() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 130
    folder, found = Path(), 0
    for line in re.findall(r"^ {4}\S.*/ .*\n(?: {4,6}\S.*\n)+", text, re.MULTILINE)[-1].splitlines():
        names = re.split(r" {3,}", line.strip())[0].split()
        inside = line.startswith(" " * 6)
        folder = folder if inside else ROOT / names[0]
        for name in names:
            path = (folder if inside else ROOT) / name
            assert path.exists() or path.with_suffix(".py").exists(), name
            found += 1
    assert found > 30


def test_commands_of_the_paper_page_load_to_a_plan() -> None:
    rows = re.findall(r"^\| .*?`(\w+\d[^`]*)` \|", (ROOT / "docs/paper.md").read_text(), re.MULTILINE)
    assert len(rows) == 21
    for command in set(rows):
        preset, *overrides = command.split()
        assert nodes(load(preset, overrides), listed=False)[-1].name == "report"


def test_the_python_page_loads_a_chain_as_a_model_card_does() -> None:
    """The card's lines are run by test_end_to_end.py."""
    page = (ROOT / "docs/python.md").read_text()
    fields = dict.fromkeys(("name", "dataset", "num_images", "rows"), "")
    card = CARD.format(last="depth_upscale", generated_bits=8, image_size=64, at_8_bits="images", **fields)
    ours, theirs = (re.sub(r"  #.*", "", text.split("```python\n")[1].split("```")[0]) for text in (page, card))
    assert ours == theirs.replace('"."', '"demo"')
