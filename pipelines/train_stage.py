"""The node train_<stage> alone: one network of the chain.

python pipelines/train_stage.py --stage size_upscale [--config NAME|FILE] [--dry-run] [key.sub=value ...]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # as a script: the project instead of this folder, whose names (git, ...) hide packages
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from pipelines import interruption

    interruption.ends_the_process()

from pipelines import cli


def main(argv: Sequence[str] | None = None) -> int:
    return cli.main_stage(argv, prog="train_stage.py")


if __name__ == "__main__":
    sys.exit(main())
