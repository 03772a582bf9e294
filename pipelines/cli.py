"""The command line that all entry points share; `--help` of each says which options it has.

Arguments, config and node names are checked before anything heavy is imported, so that a mistake is answered at once.
Exit codes: 0 done, 1 a node failed, 2 unusable arguments, config or data (one line on stderr), 130 interrupted.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from data_prep.files import FULL_DISK, Store, UserError, open_store, printable
from pipelines import cluster, inspection, pipeline
from pipelines.config import ExperimentConfig, UserImages, stage_names, train_node
from pipelines.dag.fingerprint import canonical
from pipelines.dag.masking import masked_output
from pipelines.dag.plan import nearest
from pipelines.loading import key_of, load, preset_names
from pipelines.start import OPTIONS, check_photos, removed_if_interrupted, run_folder, start

atexit.register(gc.freeze)  # Python would search all that MLflow and Ray made for garbage, for a second
FULL, UNUSABLE = 1, 2
INTERRUPTED = 130  # what shells make of SIGINT
ONE_NODE = ("prepare_data", "evaluate", "sample")  # that a command of its own runs


class Parser(argparse.ArgumentParser):
    """Mistakes become a UserError instead of a page of usage."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").split(" ")[0]
        if unknown in message and unknown.startswith("--"):
            options = [option for option in self._option_string_actions if option.startswith("--")]
            raise UserError(f"unknown option {unknown}; {nearest(unknown.partition('=')[0], options)}")
        raise UserError(f"{message} (see {self.prog} --help)")


def run_guarded(command: Callable[[], int], *, resumes: bool = True) -> int:
    """The command's exit code; a user's mistake is one line on stderr, without a traceback. No secret is printed."""
    with masked_output():
        try:
            return command()
        except UserError as error:
            print(f"error: {printable(' '.join(str(error).split()))}", file=sys.stderr)
            return UNUSABLE
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            where = printable(str(error.filename or "a disk"))
            print(f"error: no space left on {where}; the same command resumes once there is room", file=sys.stderr)
            return FULL
        except KeyboardInterrupt as error:
            why = f": {printable(str(error))}" if str(error) else ""
            then = "resumes from here" if resumes else "starts over"
            print(f"interrupted{why}; the same command {then}", file=sys.stderr)
            return INTERRUPTED


def main(argv: Sequence[str] | None = None, *, prog: str = "full_multidim.py", about: str = "") -> int:
    """Runs one of the commands of this folder, which says what it does by `about`. argv: without the program's name;
    None: the process's own."""
    command = {"compress.py": _compress, "decompress.py": _decompress, "describe.py": _describe}.get(prog, _run)
    return run_guarded(lambda: command(_parser(prog, about).parse_intermixed_args(argv)), resumes=command is _run)


def _parser(prog: str, about: str) -> Parser:
    parser = Parser(prog=prog, description=about.partition("\n")[0], allow_abbrev=False)
    if prog == "decompress.py":
        parser.add_argument("file", metavar="FILE", help="path or URI")
    presets = ", ".join(preset_names())
    parser.add_argument("--config", default="demo", metavar="NAME|FILE", help=f"{presets}, or a YAML file (demo)")
    examples = {"compress.py": "images=PHOTOS or split=test, out=FILE", "decompress.py": "out=FOLDER"}
    text = examples.get(prog, "settings, e.g. train.num_steps=500")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help=text)
    parser.set_defaults(command=prog)
    if prog == "compress.py":
        parser.add_argument("--no-check", action="store_true", help="do not decode what was written")
    if prog == "describe.py":
        parser.add_argument("--json", action="store_true", help="machine-readable")
    if prog in ("compress.py", "decompress.py", "describe.py"):
        return parser
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--dry-run", action="store_true", help="print the config and the plan, run nothing")
    choose = {"rerun": "run again even if up to date", "keep": "keep the present output, whatever changed"}
    if prog == "train_stage.py":
        parser.add_argument("--stage", required=True, help="one of the config's stages, e.g. size_upscale")
    elif prog == "full_multidim.py":
        choose |= {"only": "run these nodes only", "start_from": "run again, with all nodes downstream"}
        instead.add_argument("--status", action="store_true", help="print the state of every node, run nothing")
        instead.add_argument("--gc", action="store_true", help="list attempts that are no longer needed, run nothing")
        parser.add_argument("--yes", action="store_true", help="with --gc: delete them")
        text = "copy the trained networks to a new folder, with a model card for the Hugging Face Hub; run nothing"
        instead.add_argument("--export", metavar="FOLDER", help=text)
    elif prog == "prepare_data.py":
        instead.add_argument("--list-sources", action="store_true", help="print the layouts of raw images, run nothing")
        text = "check every file, count and pixel of a finished dataset: the config's, or the one at URI"
        instead.add_argument("--verify", nargs="?", const="", metavar="URI", help=text)
    elif prog == "evaluate.py":
        text = "print how two runs differ, image by image: RUN and the config's, or RUN and RUN; run nothing"
        instead.add_argument("--compare", action="append", metavar="RUN", help=text)
    for key, text in choose.items():
        parser.add_argument(
            OPTIONS[key], dest=key, action="extend", type=_names, default=[], metavar="NODE,...", help=text
        )
    return parser


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _run(arguments: argparse.Namespace) -> int:
    given, node = vars(arguments), arguments.command.removesuffix(".py")
    only = (node,) if node in ONE_NODE else ()
    chosen = {key: tuple(given[key]) for key in OPTIONS if key in given}
    if given.get("yes") and not arguments.gc:
        raise UserError("--yes belongs to --gc, which deletes what is no longer needed")
    for task, does in INSTEAD_OF_RUNNING.items():
        if given.get(task) not in (None, False):
            for key, nodes in chosen.items():
                if nodes:
                    raise UserError(f"{OPTIONS[key]} {nodes[0]} excludes --{task.replace('_', '-')}: leave one out")
            return does(arguments)
    config = _load(arguments)
    images = _user_images(config, only)
    if "stage" in given:
        if arguments.stage not in (names := stage_names(config)):
            hint = nearest(arguments.stage, names)
            raise UserError(f"--stage {arguments.stage}: config {config.name} has no such stage; {hint}")
        only = (train_node(arguments.stage),)
    runs = (images.node,) if images is not None else only
    print_notes(config, arguments, only=runs, images=images)
    chosen = {"only": only, "overrides": arguments.overrides, **chosen}
    return start(config, **chosen, dry_run=arguments.dry_run, images=images)


def _load(arguments: argparse.Namespace) -> ExperimentConfig:
    config = load(arguments.config, arguments.overrides)
    if "data.root" not in map(key_of, arguments.overrides):
        check_photos(config)
    return config


def _describe(arguments: argparse.Namespace) -> int:
    config = load(arguments.config, arguments.overrides)
    found = inspection.describe(config)
    print(json.dumps(found, indent=2) if arguments.json else inspection.described(found))
    return 0


def _compress(arguments: argparse.Namespace) -> int:
    target, split = _output(arguments, "FILE"), _taken(arguments, "split")
    config = _load(arguments)
    if (split is None) == (config.images is None) or split not in (None, "test"):
        raise UserError("compress.py takes either images=FILE, FOLDER or 'PATTERN', or split=test")
    from pipelines import compression  # torch

    with removed_if_interrupted(target):
        return compression.compress(config, target, check=not arguments.no_check)


def _decompress(arguments: argparse.Namespace) -> int:
    if arguments.file.startswith("out="):
        raise UserError(f"FILE is missing; decompress.py FILE {arguments.file}")
    target, config = _output(arguments, "FOLDER"), load(arguments.config, arguments.overrides)
    from pipelines import compression  # torch

    with removed_if_interrupted(target):
        return compression.decompress(config, arguments.file, target)


def _output(arguments: argparse.Namespace, what: str) -> Store:
    """Where the word out=..., which is no setting of the config, says that a command writes; nothing is there yet."""
    place = _taken(arguments, "out")
    if place is None:
        raise UserError(f"out is missing; out={what} says where to write")
    store = open_store(place)
    if store.info() is not None:
        raise UserError(f"out: {store.uri} exists; remove it or choose another name")
    return store


def _taken(arguments: argparse.Namespace, key: str) -> str | None:
    """Takes the words key=... off the overrides; the last one's value."""
    words = [word for word in arguments.overrides if key_of(word) == key and "=" in word]
    arguments.overrides = [word for word in arguments.overrides if word not in words]
    return words[-1].partition("=")[2] if words else None


def _config_of_pipeline(arguments: argparse.Namespace) -> ExperimentConfig:
    config = _load(arguments)
    _user_images(config, ())  # refuses them
    print_notes(config, arguments)
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
    return inspection.verify_dataset(uri or inspection.dataset_of(load(arguments.config, overrides)))


def _compare(arguments: argparse.Namespace) -> int:
    places = arguments.compare
    if len(places) == 1:
        places = [run_folder(load(arguments.config, arguments.overrides)).uri, *places]
    if len(places) != 2:
        raise UserError(f"--compare is given {len(places)} times; it compares two runs")
    return inspection.compare(places)


# Options with which no node runs -> what is done instead.
INSTEAD_OF_RUNNING: dict[str, Callable[[argparse.Namespace], int]] = {
    "list_sources": lambda _: inspection.list_sources(),
    "verify": _verify,
    "compare": _compare,
    "export": lambda arguments: inspection.export(_config_of_pipeline(arguments), arguments.export),
    "status": lambda arguments: inspection.show_status(_config_of_pipeline(arguments)),
    "gc": lambda arguments: inspection.collect_garbage(_config_of_pipeline(arguments), delete=arguments.yes),
}


# ---- overrides without effect -----------------------------------------------------------------------------------


def print_notes(config: ExperimentConfig, arguments: argparse.Namespace, **chosen: Any) -> None:
    """Says on stderr which overrides have no effect, so that nobody waits for one. They are no mistakes: a script may
    give several commands the same settings. An override that repeats what is set anyway is passed over.

    chosen: what the command runs, of `what_runs`.
    """
    now = what_runs(config, **chosen) if arguments.overrides else None
    idle = []
    for key in dict.fromkeys(map(key_of, arguments.overrides)):
        if key == "data.root":  # without it the run folder of other photos would be refused
            continue
        try:
            without = load(arguments.config, [other for other in arguments.overrides if key_of(other) != key])
        except UserError:  # needed
            continue
        if without != config and stage_names(without) == stage_names(config) and what_runs(without, **chosen) == now:
            idle.append(key)
    if idle:
        have = "has" if len(idle) == 1 else "have"
        print(f"note: {', '.join(idle)} {have} no effect on what {arguments.command} does", file=sys.stderr)
    if {"scaling_factor", "data.image_size"}.isdisjoint(map(key_of, arguments.overrides)):
        return
    with contextlib.suppress(UserError):  # the file alone lacks a value
        before, batch = load(arguments.config), config.train.batch_size
        side, usual = (each.data.image_size // each.scaling_factor for each in (config, before))
        same = before.train.batch_size * usual**2 / side**2  # as the paper's appendix C has it
        if batch != same:
            what = f"{batch:,} slices of {side}x{side} has {batch / same:.3g} times the pixels of {before.name}'s"
            print(f"note: a batch of {what}; train.batch_size={max(1, round(same))} keeps them", file=sys.stderr)


def what_runs(config: ExperimentConfig, *, only: Sequence[str] = (), images: UserImages | None = None) -> Any:
    """The nodes that a command runs, what decides the results of those upstream, and where all of it happens."""
    made = {node.name: node for node in pipeline.nodes(config, images=images, listed=False)}
    needed = list(only or made)
    for name in needed:  # grows on the way
        needed += [upstream for upstream in made[name].needs if upstream not in needed]
    resources = config.resources
    return (
        [made[name] if not only or name in only else canonical(made[name].config) for name in needed],
        (config.images, config.image_bits, config.image_fit, config.sample.set_for_images()),
        (config.name, config.storage, config.tracking.uri),
        None if cluster.joins() else (resources.num_cpus, resources.num_gpus),
    )
