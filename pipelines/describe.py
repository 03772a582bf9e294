"""Parameters, FLOPs, batch sizes and GPU-hours of a config's stages: no weights, no data, no training.

python pipelines/describe.py --config imagenet128 [--json] [key.sub=value ...]
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the project instead of this folder
    from pipelines import cli

    sys.exit(cli.main(prog=Path(__file__).name, about=__doc__))
