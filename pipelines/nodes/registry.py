"""MLflow's model registry: a model is named <experiment>.<stage>, a version is one finished training.

A version points to its checkpoint's folder. The one that `evaluate` scored last is the candidate; `judge` says when it
becomes the champion.
"""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pyarrow as pa

from data_prep.files import UserError, open_store, parent
from data_prep.parquet import open_parquet
from pipelines.dag.masking import plain_uri
from pipelines.tracking import NodeRun, check_usable, is_server, make_client, sqlite_file

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

CANDIDATE, CHAMPION = "candidate", "champion"  # aliases
FIRST_GIVEN = " without slice (0, 0)"  # at the end of StageModel.scored_dims


@dataclass(frozen=True)
class StageModel:
    """A trained stage and its exact score: the tags of a version."""

    stage: str
    checkpoint: str  # folder with config.json, model.safetensors, ema.safetensors: local path or URI
    attempt: str  # of the train node: the same training is registered once
    test_bits_per_dim: float  # the stage's part, on all test images
    standard_error: float  # over them
    test_set: str  # digest of the test images' shards
    scored_dims: str  # which dims of an image were scored, in words that are equal only for equal dims
    scores: str  # file with the bits/dim of each test image in a column named as the stage: local path or URI


def register(run: NodeRun, model: StageModel) -> None:
    """The network that this run trained becomes a version in the model registry, with its aliases."""
    run.send(lambda client: add_version(client, run.handle.run_id or "", model))


def add_version(client: MlflowClient, run_id: str, model: StageModel) -> None:
    """Registers the network that a run trained, unless it is there, and sets the aliases. May be called again after it
    broke off: nothing is done twice."""
    run = client.get_run(run_id)
    name = f"{client.get_experiment(run.info.experiment_id).name}.{model.stage}"
    if not client.search_registered_models(filter_string=f"name = '{name}'"):
        client.create_registered_model(name, description=f"Stage {model.stage}: see docs/comparing_stages.md")
    known = client.search_model_versions(f"name = '{name}'")
    version = next((v.version for v in known if v.tags.get("attempt") == model.attempt), None)
    tags = {key: plain_uri(str(value)) for key, value in asdict(model).items()}
    source = _source(client, run, model)
    if version is None:
        version = client.create_model_version(name, source, run_id, tags=tags, await_creation_for=0).version
    for key, value in tags.items():
        client.set_model_version_tag(name, version, key, value)
    place = tags["checkpoint"] if source.startswith("runs:/") else f"models:/{name}/{version}"
    client.update_model_version(name, version, _card(run, model, place))
    client.set_registered_model_alias(name, CANDIDATE, version)
    holder = client.get_registered_model(name).aliases.get(CHAMPION)
    champion = next((v.tags for v in known if str(v.version) == str(holder)), None)
    moves, why = judge(model, champion)
    client.set_model_version_tag(name, version, "champion_rule", why)
    print(f"{name}, version {version}: {why}")
    if moves:
        client.set_registered_model_alias(name, CHAMPION, version)


def attempts_with_alias(uri: str, *, experiment: str) -> set[str]:
    """Attempts that trained or scored a model version with an alias. Raises UserError if MLflow does not say."""
    try:
        if (file := sqlite_file(uri)) and not file.exists():
            raise FileNotFoundError("the file does not exist")
        check_usable(uri)
        client = make_client(uri)
        models = client.search_registered_models(filter_string=f"name LIKE '{experiment}.%'", max_results=1000)
        named = {(model.name, version) for model in models for version in model.aliases.values()}
        tags = [client.get_model_version(*each).tags for each in named]
        files = [Path(each.get("scores", "").partition("?")[0]) for each in tags]
        return {*(each.get("attempt", "") for each in tags), *(file.parent.name for file in files)}
    except Exception as error:
        why = " ".join(str(error).split())[:300]
        raise UserError(f"MLflow at {uri} does not say which model versions have an alias ({why})") from error


def judge(model: StageModel, champion: dict[str, str] | None) -> tuple[bool, str]:
    """Whether a model becomes the champion, and why: for a gain of more than two standard errors of the paired
    difference, on the same test set and dims. champion: the tags of the one that is; None: there is no other."""
    if champion is None or champion.get("attempt") == model.attempt:
        return True, "champion: no other version holds the title"
    for key, own in (("test_set", model.test_set), ("scored_dims", model.scored_dims)):
        if champion.get(key) != own:
            return False, f"not compared: the champion's {key} is {champion.get(key)}, this one's {own}"
    try:
        theirs, ours = read_scores(_reachable(champion["scores"], model.scores)), read_scores(model.scores)
        gain, error = paired_difference(theirs, ours, model.stage)
    except (OSError, ValueError, KeyError, UserError) as problem:
        return False, f"champion stays: the scores per image cannot be compared ({problem}); delete the alias?"
    moves = gain > 2 * error
    found = f"this version gains {gain:.6f} bits/dim, and two standard errors are {2 * error:.6f}"
    return moves, f"champion: {found}" if moves else f"champion stays: {found}"


def _reachable(plain: str, own: str) -> str:
    """A file's URI with the login and the options of `own` if both are in one bucket: tags have neither."""
    theirs, ours = urlsplit(plain), urlsplit(own)
    same = theirs.scheme and (theirs.scheme, theirs.netloc) == (ours.scheme, ours.netloc.rpartition("@")[2])
    return ours._replace(path=theirs.path).geturl() if same else plain


def read_scores(uri: str) -> pa.Table:
    """Bits/dim of each image: a row per image, by key, and a column per part. Raises OSError, ValueError."""
    folder, name = parent(uri)
    return open_parquet(pa.BufferReader(open_store(folder).read_bytes(name)), name=name).read().sort_by("key")


def paired_difference(first: pa.Table, second: pa.Table, part: str) -> tuple[float, float]:
    """Mean of first - second and its standard error (NaN of one image). Raises ValueError for different images."""
    if first.column("key") != second.column("key"):
        raise ValueError("they score different images")
    change = first.column(part).to_numpy() - second.column(part).to_numpy()
    spread = float(change.std(ddof=1)) if len(change) > 1 else math.nan
    return float(change.mean()), spread / math.sqrt(len(change))


def _card(run: Any, model: StageModel, place: str) -> str:
    """Description of a version, in Markdown. place: what downloads its files."""
    data = ", ".join(f"{each.dataset.name} ({each.dataset.digest})" for each in run.inputs.dataset_inputs)
    bits = f"{model.test_bits_per_dim:.4f} ± {model.standard_error:.4f}"
    return f"""\
Stage {model.stage} of a Subscale Pixel Network ({model.scored_dims}): {bits} bits/dim, exact, on the test images.
Trained and validated on {data}.

    import pathlib, mlflow, spn.checkpoint, spn.evaluation
    network = spn.checkpoint.load_model(pathlib.Path(mlflow.artifacts.download_artifacts("{place}")))
    slices = spn.evaluation.scored_slices(network, first_given={model.scored_dims.endswith(FIRST_GIVEN)})
    nats = spn.evaluation.stage_nats(network, px.long(), slices=slices)  # as in the schema
"""


def _source(client: MlflowClient, run: Any, model: StageModel) -> str:
    """The checkpoint's folder; a server takes a local path only among a run's artifacts, so there a note lies.

    Such a note is the checkpoint's address. MLflow looks for the signature in a file MLmodel.
    """
    uri, files = plain_uri(model.checkpoint), {}
    if size := int(run.data.params.get("model.image_size", 0)):
        px = {"type": "tensor", "name": "px", "tensor-spec": {"dtype": "uint8", "shape": [-1, 3, size, size]}}
        nats = {"type": "tensor", "name": "nats", "tensor-spec": {"dtype": "float64", "shape": [-1, -1, 3]}}
        signature = {"inputs": json.dumps([px]), "outputs": json.dumps([nats])}  # nats of each slice and channel
        files["MLmodel"] = json.dumps({"flavors": {}, "signature": signature}, indent=1)
    if "://" in uri or not is_server(client.tracking_uri):
        with contextlib.suppress(OSError):  # nobody may write there any more
            if files and not (store := open_store(model.checkpoint)).exists("MLmodel"):
                store.write_text("MLmodel", files["MLmodel"])
        return uri
    files["location.json"] = json.dumps({"checkpoint": uri}, indent=1)
    for name, text in files.items():
        client.log_text(run.info.run_id, text, f"checkpoint/{name}")
    return f"runs:/{run.info.run_id}/checkpoint"
