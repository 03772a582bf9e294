"""prepare_data.py --verify without a dataset; with one: nodes/test_end_to_end.py.

python -m pytest tests/pipelines/commands/test_verify.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines import cli

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """command(*arguments) -> (exit code, stdout, stderr) of prepare_data.py on the debug config."""

    def call(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(["--config", "debug", *arguments, f"storage={tmp_path}"], prog="prepare_data.py")
        return code, *capsys.readouterr()

    return call


def test_there_must_be_a_data_set(command: Command, tmp_path: Path) -> None:
    code, out, err = command("--verify")
    assert (code, out) == (2, "")
    assert err == "error: --verify: config debug has no finished dataset (no output yet); build it first\n"
    code, out, err = command("--verify", str(tmp_path))
    assert (code, out) == (2, "")
    assert err == f"error: --verify {tmp_path}: {tmp_path} is not a finished dataset: it has no manifest.json\n"
    code, _, err = command("--verify", "data.sed=3")
    assert code == 2 and "unknown key data.sed" in err
