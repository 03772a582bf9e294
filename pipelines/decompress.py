"""The images of a file that compress.py wrote, as PNG files.

python pipelines/decompress.py FILE out=FOLDER [--config NAME|FILE] [key.sub=value ...]
"""

import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    from pipelines import cli

    parser = cli.Parser(prog="decompress.py", description="Writes the images of a file of compress.py as PNG files.")
    parser.add_argument("file", metavar="FILE", help="path or URI")
    cli.add_config_arguments(parser)
    return cli.run_guarded(lambda: cli.decompress(parser.parse_intermixed_args(argv)), resumes=False)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the project instead of this folder
    sys.exit(main())
