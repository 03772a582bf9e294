"""The whole pipeline: raw photos to Parquet, every stage's network, exact bits/dim, samples and a report.

python pipelines/full_multidim.py [--config NAME|FILE] [--dry-run] [--only NODE,...] [--rerun NODE,...] [key=value ...]
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the project instead of this folder
    from pipelines import cli

    sys.exit(cli.main(prog=Path(__file__).name, about=__doc__))
