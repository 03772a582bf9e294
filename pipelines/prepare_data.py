"""The node prepare_data alone: raw photos to Parquet at each resolution and bit depth.

python pipelines/prepare_data.py [--config NAME|FILE] [--dry-run] [key.sub=value ...]
python pipelines/prepare_data.py --list-sources
python pipelines/prepare_data.py --verify [URI] [--config NAME|FILE]     re-read a finished dataset; 1 if damaged
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the project instead of this folder
    from pipelines import cli

    sys.exit(cli.main(prog=Path(__file__).name, about=__doc__))
