"""The node sample alone: images drawn from the chain of trained stages; or the user's own images upscaled, completed.

python pipelines/sample.py [--config NAME|FILE] [--dry-run] [sample.num_images=64 key.sub=value ...]
python pipelines/sample.py [...] images=FILE sample.use=size_upscale|depth_upscale|complete [sample.num_draws=4 ...]
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # the project instead of this folder
    from pipelines import cli

    sys.exit(cli.main(prog=Path(__file__).name, about=__doc__))
