"""Images coded without loss by a trained chain, all of them in one file.

python pipelines/compress.py [--config NAME|FILE] images=FILE|FOLDER|'PATTERN' out=FILE [--no-check] [key.sub=value ...]
python pipelines/compress.py [--config NAME|FILE] split=test out=FILE [--no-check] [key.sub=value ...]
"""

import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    from pipelines import cli

    parser = cli.Parser(prog="compress.py", description="Codes images without loss by a trained chain.")
    cli.add_config_arguments(parser)
    parser.add_argument("--no-check", action="store_true", help="do not decode what was written")
    return cli.run_guarded(lambda: cli.compress(parser.parse_intermixed_args(argv)), resumes=False)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the project instead of this folder
    sys.exit(main())
