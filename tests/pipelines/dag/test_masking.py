"""No secret in what people see.  python -m pytest tests/pipelines/dag/test_masking.py"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from data_prep.files import UserError
from pipelines import cli
from pipelines.dag import fingerprint
from pipelines.dag.masking import HIDDEN, mask, mask_uris, masked_output, plain_uri
from pipelines.dag.node import Node

SECRET = "hunter2secret"


@pytest.mark.parametrize(
    "uri",
    [
        f"http://anna:{SECRET}@mlflow.example.org:5000/path",
        f"https://{SECRET}@mlflow.example.org",
        f"postgresql+psycopg2://anna:{SECRET}@db:5432/mlflow",
        f"s3://AKIA{SECRET}:{SECRET}/with/slashes@bucket/runs",
        f"s3://bucket/a?X-Amz-Credential={SECRET}&X-Amz-Signature={SECRET}&X-Amz-Security-Token={SECRET}&region=eu",
        f"s3://bucket/a?endpoint_override=h:1;session_token={SECRET}",
        f"https://account.blob.core.windows.net/c?sv=2020&sig={SECRET}",
        f"gs://bucket/x?access_token={SECRET}",
    ],
)
def test_secrets_of_uris_are_gone_and_the_rest_stays(uri: str) -> None:
    text = f"could not open '{uri}': refused"
    masked = mask_uris(text)
    assert SECRET not in masked and HIDDEN in masked
    assert masked.startswith("could not open '" + uri.partition("://")[0] + "://") and masked.endswith("': refused")
    for kept in ("bucket", "mlflow.example.org", "region=eu", "endpoint_override=h:1", "db:5432/mlflow"):
        assert (kept in masked) == (kept in uri)
    assert mask_uris(masked) == masked
    assert SECRET not in plain_uri(uri)


@pytest.mark.parametrize(
    "text",
    [
        "sqlite:////home/anna/runs/demo/mlflow.db",
        "http://127.0.0.1:5000/#/experiments/1/runs/2?workflowType=machine_learning",
        "s3://bucket/runs/demo?region=eu-west-1&endpoint_override=127.0.0.1:9000",
        "/data/anna@home/photo.jpg of models:/demo.size_upscale@champion",
        "http://127.0.0.1:5000/#/models/demo.size_upscale@champion",
        "train.num_steps=500 a: b@c",
    ],
)
def test_what_holds_no_secret_is_left_alone(text: str) -> None:
    assert mask_uris(text) == text


def test_values_of_secret_variables_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "SOME_API_KEY"):
        monkeypatch.setenv(name, f"{name}-{SECRET}")
    monkeypatch.setenv("OTHER_PASSWORD", "no")  # too short to be told from a word
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "falsehood")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/var/run/token")
    text = " ".join(f"{name}-{SECRET}" for name in ("MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN"))
    assert mask(text) == " ".join([HIDDEN] * 3)
    assert mask("no falsehood in /var/run/token") == "no falsehood in /var/run/token"


def test_output_of_a_command_is_masked_whoever_writes_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", SECRET)

    def command() -> int:
        print("storage: s3://me:" + SECRET + "@bucket")
        sys.stderr.writelines([f"{SECRET}\n"])
        handler = logging.StreamHandler()
        logging.getLogger("test").addHandler(handler)
        logging.getLogger("test").warning("password %s", SECRET)
        logging.getLogger("test").removeHandler(handler)
        raise UserError(f"storage s3://me:{SECRET}@bucket cannot be opened")

    assert cli.run_guarded(command) == cli.UNUSABLE
    out, err = capsys.readouterr()
    assert SECRET not in out + err
    assert out == "storage: s3://***@bucket\n" and err.count(HIDDEN) == 3


def test_the_streams_are_what_they_were_afterwards() -> None:
    before = sys.stdout, sys.stderr
    with masked_output():
        assert sys.stdout.isatty() == before[0].isatty()
        assert sys.stdout is not before[0]
    assert (sys.stdout, sys.stderr) == before


def test_a_new_login_makes_nothing_run_again(tmp_path: Path) -> None:
    """Ingredients lie in _SUCCESS.json, and parameters in MLflow: neither holds a login, nor depends on it."""

    def parts(login: str) -> dict[str, object]:
        config = {"train": {"init_from": f"s3://{login}@bucket/checkpoint"}}
        return fingerprint.ingredients(Node("a", "a:b", config=config), code={}, upstream={})

    first, second = parts(f"anna:{SECRET}"), parts(f"bert:other{SECRET}")
    assert SECRET not in str(first)
    assert fingerprint.fingerprint(first) == fingerprint.fingerprint(second)
    assert fingerprint.flatten({"uri": f"http://anna:{SECRET}@host"}) == {"uri": "http://***@host"}
