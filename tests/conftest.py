"""For every test: one small Ray session, and tiny networks with parameters that let a leak show.

An untrained network can pass a causality test for nothing: zero biases, dead ReLUs, timing signals that drown the rest.
`randomised` therefore draws every parameter anew, wide enough that each unit is alive.

    python -m pytest -m "not slow and not gpu"
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spn.config import DecoderConfig, EmbedderConfig, SPNConfig
from spn.layers import GroupRMSNorm
from spn.model import SPN

# Ray stays on loopback, without telemetry and tokens. It reads some of these on import, so they are set before; its
# workers are new processes and find this checkout only through the environment.
os.environ.update(
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_AUTH_MODE="disabled",
    RAY_DATA_USE_DATASOURCE_V2="0",
    RAY_CHDIR_TO_TRIAL_DIR="0",
    RAY_idle_worker_killing_time_threshold_ms="120000",  # the next test takes the process over
    PYTHONPATH=os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])),
)
os.environ.pop("RAY_ADDRESS", None)


# Files whose tests use Ray. Under pytest-xdist they run in one process: two sessions at once would have too few cores.
WITH_RAY = {f"data_prep/{name}.py" for name in ("test_build", "test_ingest", "test_kill", "test_ray_compat")}
WITH_RAY |= {"pipelines/cluster/test_cluster.py", "pipelines/commands/test_start.py", "pipelines/dag/test_run.py"}
WITH_RAY |= {"pipelines/nodes/test_end_to_end.py", "pipelines/nodes/test_sample.py"}
# Their sessions are in other processes: they may run beside those above, and take longest, so they begin first.
ALONE = {"pipelines/nodes/test_end_to_end.py", "pipelines/cluster/test_job_submit.py"}


def file_of(nodeid: str) -> str:
    """A test's file, relative to tests/."""
    return nodeid.partition("::")[0].removeprefix("tests/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: 0 if file_of(item.nodeid) in ALONE else 1 if file_of(item.nodeid) in WITH_RAY else 2)
    for item in items:
        if "ray_session" in getattr(item, "fixturenames", ()) and file_of(item.nodeid) not in WITH_RAY:
            raise pytest.UsageError(f"{item.path} uses Ray; name it in WITH_RAY of tests/conftest.py")


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each file runs in one process, so that its tests share what its fixtures made."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "with Ray" if file_of(nodeid) in WITH_RAY else file_of(nodeid)

    config.option.loadscopereorder = False  # in the order above, not by number of tests
    return ByFile(config, log)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A local Ray session of 2 CPUs and a GPU by name alone: a process can have one session, so all rooms share it."""
    import ray

    ray.init(
        address="local",
        num_cpus=2,
        num_gpus=1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=200_000_000,
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    """host:port of an S3 server in this process, which listens on the loopback interface only."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    yield "{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture(scope="module")
def s3(s3_endpoint: str) -> Callable[[str], str]:
    """s3("bucket/path") -> its URI on that server, whose bucket it makes."""
    from pyarrow.fs import FileSystem

    def uri(path: str) -> str:
        found = f"s3://key:secret@{path}?scheme=http&endpoint_override={s3_endpoint}&region=us-east-1"
        FileSystem.from_uri(f"{found}&allow_bucket_creation=true")[0].create_dir(path.partition("/")[0])
        return found

    return uri


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """Tiny tensors: a second thread costs more than it gives, and one thread makes sums repeatable."""
    torch.set_num_threads(1)


def make_config(stage: str, *, image_size: int, scaling_factor: int, **changes: Any) -> SPNConfig:
    """A network of a few thousand parameters. changes: num_bits, num_given_bits, decoder={...}, embedder={...}."""
    decoder = dict(
        num_layers=2,
        conv_channels=9,
        residual_channels=48,
        num_attn_layers=1,
        num_attn_heads=2,
        attn_head_dim=4,
        num_memory_rows=5,
    )
    embedder = dict(
        num_conv_layers=1,
        conv_channels=9,
        residual_channels=32,
        num_attn_layers=1,
        num_attn_heads=2,
        attn_head_dim=4,
        num_memory_rows=5,
    )
    decoder |= changes.pop("decoder", {})
    embedder |= changes.pop("embedder", {})
    has_embedder = stage.startswith(("size_upscale", "depth_upscale"))
    return SPNConfig(
        stage=stage,
        image_size=image_size,
        scaling_factor=scaling_factor,
        decoder=DecoderConfig(**decoder),
        embedder=EmbedderConfig(**embedder) if has_embedder else None,
        **({"num_bits": 1, "num_given_bits": int(stage.startswith("depth_upscale"))} | changes),
    )


@torch.no_grad()
def randomise(module: nn.Module, seed: int) -> nn.Module:
    """Every parameter drawn anew, in float64; matrices keep the scale of their input, vectors are of order 1."""
    module.double().eval()
    generator = torch.Generator().manual_seed(seed)
    tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    norms = {id(m.weight) for m in module.modules() if isinstance(m, nn.LayerNorm | nn.RMSNorm)}
    norms |= {id(m.gain) for m in module.modules() if isinstance(m, GroupRMSNorm)}
    for parameter in module.parameters():
        parameter.normal_(generator=generator)
        if id(parameter) in norms:
            parameter.mul_(0.3).add_(1)
        elif parameter.ndim == 1:
            parameter.mul_(0.5)
        elif parameter.ndim in (2, 4) and id(parameter) not in tables:
            parameter.mul_(1.5 * parameter[0].numel() ** -0.5)
    return module


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., SPNConfig]:
    return make_config


@pytest.fixture(scope="session")
def randomised() -> Callable[..., Any]:
    """randomised(module, seed) -> the same module in float64 and evaluation mode, all parameters re-drawn."""
    return randomise


@pytest.fixture(scope="session")
def tiny_spn() -> Callable[..., SPN]:
    """tiny_spn(stage, seed=..., image_size=..., scaling_factor=..., ...) -> a re-randomised network in float64."""

    def build(stage: str, *, seed: int, **changes: Any) -> SPN:
        return randomise(SPN(make_config(stage, **changes)), seed)

    return build


@pytest.fixture(scope="session")
def random_values() -> Callable[..., Tensor]:
    """random_values(seed, num_bits, *shape) -> int64 intensities."""

    def draw(seed: int, num_bits: int, *shape: int) -> Tensor:
        return torch.randint(2**num_bits, shape, generator=torch.Generator().manual_seed(seed))

    return draw
