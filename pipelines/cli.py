"""The command line that all entry points share.

    --config NAME|FILE  --dry-run  --rerun NODE,...  --keep NODE,...  key.sub=value ...
    full_multidim.py alone: --only NODE,...  --from NODE,...  --status  --gc [--yes]
    prepare_data.py alone: --list-sources  --verify [URI]

Arguments, config and node names are checked before anything heavy is imported, so that a mistake is answered at once.
Exit codes: 0 done, 1 a node failed, 2 unusable arguments, config or data (one line on stderr), 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from data_prep.files import UserError, printable
from pipelines import inspection
from pipelines.config import ExperimentConfig, nearest, stage_names, train_node
from pipelines.dag.masking import masked_output
from pipelines.loading import load, preset_names
from pipelines.overrides import notes, what_runs
from pipelines.start import start

if TYPE_CHECKING:
    from pipelines.nodes.images import UserImages

UNUSABLE = 2
INTERRUPTED = 130  # what shells make of SIGINT
CHOICES = {"--only": "only", "--rerun": "rerun", "--keep": "keep", "--from": "start_from"}


class Parser(argparse.ArgumentParser):
    """Mistakes become a UserError instead of a page of usage."""

    def __init__(self, *, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").split(" ")[0]
        if unknown in message and unknown.startswith("--"):
            options = [option for option in self._option_string_actions if option.startswith("--")]
            raise UserError(f"unknown option {unknown}; {nearest(unknown.partition('=')[0], options)}")
        raise UserError(f"{message} (see {self.prog} --help)")


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    presets = ", ".join(preset_names())
    parser.add_argument("--config", default="demo", metavar="NAME|FILE", help=f"{presets}, or a YAML file (demo)")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="settings, e.g. train.num_steps=500")
    parser.set_defaults(command=parser.prog)


def print_notes(
    config: ExperimentConfig, arguments: argparse.Namespace, *, reads: Callable[[ExperimentConfig], Any]
) -> None:
    """On stderr, which overrides do not reach every stage, and which have no effect on what the command reads."""
    for line in notes(config, arguments.config, arguments.overrides, command=arguments.command, reads=reads):
        print(f"note: {line}", file=sys.stderr)


def run_guarded(command: Callable[[], int]) -> int:
    """The command's exit code; a user's mistake is one line on stderr, without a traceback. No secret is printed."""
    with masked_output():
        try:
            return command()
        except UserError as error:
            print(f"error: {printable(' '.join(str(error).split()))}", file=sys.stderr)
            return UNUSABLE
        except KeyboardInterrupt as error:
            why = f": {printable(str(error))}" if str(error) else ""
            print(f"interrupted{why}; the same command resumes from here", file=sys.stderr)
            return INTERRUPTED


def main(argv: Sequence[str] | None = None, *, prog: str = "full_multidim.py", only: Sequence[str] = ()) -> int:
    """Runs the pipeline, or the nodes in `only` alone. argv: without the program's name; None: the process's own."""
    return run_guarded(lambda: _main(argv, prog=prog, only=tuple(only), choose_stage=False))


def main_stage(argv: Sequence[str] | None = None, *, prog: str = "train_stage.py") -> int:
    """Trains the stage that --stage names."""
    return run_guarded(lambda: _main(argv, prog=prog, only=(), choose_stage=True))


def _main(argv: Sequence[str] | None, *, prog: str, only: tuple[str, ...], choose_stage: bool) -> int:
    single = bool(only) or choose_stage
    what = "one stage's training" if choose_stage else f"the node {only[0]}" if only else "the whole pipeline"
    parser = Parser(prog=prog, description=f"Runs {what}; what is up to date is skipped.")
    add_config_arguments(parser)
    if choose_stage:
        parser.add_argument("--stage", required=True, help="one of the config's stages, e.g. size_upscale")
    choose = {"--rerun": "run again even if up to date", "--keep": "keep the present output, whatever changed"}
    if not single:
        choose |= {"--only": "run these nodes only", "--from": "run again, with all nodes downstream"}
        parser.add_argument("--status", action="store_true", help="print the state of every node, run nothing")
        parser.add_argument("--gc", action="store_true", help="list attempts that are no longer needed, run nothing")
        parser.add_argument("--yes", action="store_true", help="with --gc: delete them")
    for option, text in choose.items():
        key = CHOICES[option]
        parser.add_argument(option, dest=key, action="append", default=[], metavar="NODE,...", help=text)
    if only == ("prepare_data",):
        parser.add_argument(
            "--list-sources", action="store_true", help="print which layouts of raw images can be read, and stop"
        )
        text = "check every file, count and pixel of a finished dataset: the config's, or the one at URI"
        parser.add_argument("--verify", nargs="?", const="", metavar="URI", help=text)
    parser.add_argument("--dry-run", action="store_true", help="print the config and the plan, run nothing")
    arguments = parser.parse_intermixed_args(argv)
    chosen = {
        key: _names(option, getattr(arguments, key)) for option, key in CHOICES.items() if hasattr(arguments, key)
    }
    look = _looks(arguments, chosen)
    if look is not None:
        return look(arguments)
    config = load(arguments.config, arguments.overrides)
    images = _user_images(config, only)
    if choose_stage:
        stage = _known_stage(config, arguments.stage)
        only = (train_node(stage),)
    runs = (images.node,) if images is not None else only
    print_notes(config, arguments, reads=lambda config: what_runs(config, only=runs, images=images))
    return start(config, **{"only": only, **chosen}, dry_run=arguments.dry_run, images=images)


def _looks(
    arguments: argparse.Namespace, chosen: dict[str, tuple[str, ...]]
) -> Callable[[argparse.Namespace], int] | None:
    """What an option that runs nothing does with the arguments, None without one; UserError for what it excludes."""
    looks = {
        "--list-sources": lambda _: inspection.list_sources(),
        "--verify": _verify,
        "--status": lambda arguments: inspection.show_status(_config_of_pipeline(arguments)),
        "--gc": lambda arguments: inspection.collect_garbage(_config_of_pipeline(arguments), delete=arguments.yes),
    }
    given = [option for option in looks if getattr(arguments, option[2:].replace("-", "_"), None) not in (None, False)]
    asked = [*given, *(["--dry-run"] if arguments.dry_run else [])]
    if getattr(arguments, "yes", False) and "--gc" not in given:
        raise UserError("--yes belongs to --gc, which deletes what is no longer needed")
    if len(asked) > 1:
        raise UserError(f"{asked[0]} and {asked[1]} exclude each other")
    if not given:
        return None
    for option, key in CHOICES.items():
        if chosen.get(key):
            what = "looks at all nodes" if given[0] in ("--status", "--gc") else "runs no node"
            raise UserError(f"{option} {chosen[key][0]}: {given[0]} {what}; leave it out")
    return looks[given[0]]


def _config_of_pipeline(arguments: argparse.Namespace) -> ExperimentConfig:
    config = load(arguments.config, arguments.overrides)
    _user_images(config, ())  # refuses them
    print_notes(config, arguments, reads=lambda config: what_runs(config, only=(), images=None))
    return config


def _user_images(config: ExperimentConfig, only: tuple[str, ...]) -> UserImages | None:
    """The images that `images` names, checked for what the command does with them; None if it names none."""
    if config.images is None:
        return None
    if only not in (("sample",), ("evaluate",)):
        raise UserError("images is for sample.py, which starts from them, and evaluate.py, which scores them")
    from pipelines.nodes import images  # decoders of images

    return images.for_sampling(config) if only == ("sample",) else images.for_scoring(config)


def _verify(arguments: argparse.Namespace) -> int:
    uri, overrides = arguments.verify, arguments.overrides
    if "=" in uri.partition("/")[0]:  # `--verify key=value`: the word after the option is an override
        uri, overrides = "", [uri, *overrides]
    for override in overrides if uri else ():
        print(f"note: {override} has no effect: --verify {uri} looks at that dataset alone", file=sys.stderr)
    return inspection.verify_dataset(uri or inspection.dataset_of(load(arguments.config, overrides)))


def _names(option: str, values: Sequence[str]) -> tuple[str, ...]:
    names = [name.strip() for value in values for name in value.split(",")]
    if not all(names):
        raise UserError(f"{option} {','.join(values)!r}: it takes node names, e.g. {option} evaluate,sample")
    return tuple(dict.fromkeys(names))


def _known_stage(config: ExperimentConfig, stage: str) -> str:
    names = stage_names(config)
    if stage not in names:
        has = f"it has {', '.join(names)}"
        near = nearest(stage, names)
        hint = f"{near}; {has}" if near.startswith("nearest") else has
        raise UserError(f"--stage {stage}: config {config.name} has no such stage; {hint}")
    return stage
