"""The whole pipeline: raw photos to Parquet, every stage's network, exact bits/dim, samples and a report.

python pipelines/full_multidim.py [--config NAME|FILE] [--dry-run] [--only NODE,...] [--rerun NODE,...] [key=value ...]
"""

import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    from pipelines import cli

    return cli.main(argv, prog="full_multidim.py")


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the project instead of this folder
    sys.exit(main())
