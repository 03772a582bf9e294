"""The node prepare_data alone: raw photos to Parquet at each resolution and bit depth.

python pipelines/prepare_data.py [--config NAME|FILE] [--dry-run] [key.sub=value ...]
python pipelines/prepare_data.py --list-sources
python pipelines/prepare_data.py --verify [URI] [--config NAME|FILE]     re-read a finished dataset; 1 if damaged
"""

import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    from pipelines import cli

    return cli.main(argv, prog="prepare_data.py", only=("prepare_data",))


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the project instead of this folder
    sys.exit(main())
