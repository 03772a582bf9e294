"""The node evaluate alone: exact bits/dim of each stage and of the whole chain on held-out images, or on one's own.

python pipelines/evaluate.py [--config NAME|FILE] [--dry-run] [key.sub=value ...]
python pipelines/evaluate.py [...] images=FILE|FOLDER|'PATTERN'
python pipelines/evaluate.py [...] --compare RUN [--compare RUN]
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the project instead of this folder
    from pipelines import cli

    sys.exit(cli.main(prog=Path(__file__).name, about=__doc__))
