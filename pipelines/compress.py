"""Images coded without loss by a trained chain, all of them in one file.

python pipelines/compress.py [--config NAME|FILE] images=FILE|FOLDER|'PATTERN' out=FILE [--no-check] [key.sub=value ...]
python pipelines/compress.py [--config NAME|FILE] split=test out=FILE [--no-check] [key.sub=value ...]
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the project instead of this folder
    from pipelines import cli

    sys.exit(cli.main(prog=Path(__file__).name, about=__doc__))
