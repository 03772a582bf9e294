"""The node train_<stage> alone: one network of the chain.

python pipelines/train_stage.py --stage size_upscale [--config NAME|FILE] [--dry-run] [key.sub=value ...]
"""

import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    from pipelines import cli

    return cli.main(argv, prog="train_stage.py", one_stage=True)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the project instead of this folder
    sys.exit(main())
