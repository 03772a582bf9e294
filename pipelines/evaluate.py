"""The node evaluate alone: exact bits/dim of each stage and of the whole chain on held-out images, or on one's own.

python pipelines/evaluate.py [--config NAME|FILE] [--dry-run] [key.sub=value ...]
python pipelines/evaluate.py [...] images=FILE|FOLDER|'PATTERN'
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
    return cli.main(argv, prog="evaluate.py", only=["evaluate"])


if __name__ == "__main__":
    sys.exit(main())
