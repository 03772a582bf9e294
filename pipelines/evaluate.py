"""The node evaluate alone: exact bits/dim of each stage and of the whole chain on held-out images, or on one's own.

python pipelines/evaluate.py [--config NAME|FILE] [--dry-run] [key.sub=value ...]
python pipelines/evaluate.py [...] images=FILE|FOLDER|'PATTERN'
python pipelines/evaluate.py [...] --compare RUN [--compare RUN]
"""

import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    from pipelines import cli

    return cli.main(argv, prog="evaluate.py", only=("evaluate",))


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the project instead of this folder
    sys.exit(main())
