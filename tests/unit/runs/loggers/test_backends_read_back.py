# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Real TensorBoard, W&B and MLflow backends, written and read back."""

import fcntl
import json
import math
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.errors import DataError
from nemo_rl_moe.runs.folder.metrics import JsonlLogger
from nemo_rl_moe.runs.loggers.mlflow import MlflowLogger, flatten_config, local_store_uri
from nemo_rl_moe.runs.loggers.tensorboard import TensorBoardLogger
from nemo_rl_moe.runs.loggers.wandb import WandbLogger, choose_mode
from tests.support.loggers import MetricHistory, read_jsonl, read_mlflow, read_tensorboard, read_wandb_offline

CONFIG = {"policy": {"model_name": "tiny", "megatron_cfg": {"track_moe_metrics": True}}, "empty": {}, "steps": [1, 2]}


def metrics_of(step: int) -> dict[str, float]:
    values = {"train/loss": 1 / (step + 1), "train/moe/load_balancing_loss_layer_3": 1.0 + step, "train/odd": math.nan}
    if step == 2:
        values |= {"val/accuracy": 0.75, "val/up": math.inf, "val/down": -math.inf}
    return values


def expected() -> MetricHistory:
    history: MetricHistory = {}
    for step in range(4):
        for key, value in metrics_of(step).items():
            history.setdefault(key, []).append((step, value))
    return history


def assert_same(actual: MetricHistory, wanted: MetricHistory, relative: float = 0.0) -> None:
    assert actual.keys() == wanted.keys()
    for key, points in wanted.items():
        assert [step for step, _ in actual[key]] == [step for step, _ in points]
        values = [value for _, value in actual[key]]
        assert values == pytest.approx([value for _, value in points], rel=relative, abs=0.0, nan_ok=True), key


def test_jsonl(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path, warn=pytest.fail, message=pytest.fail)
    for step in range(4):
        logger.log_step(step, metrics_of(step))
    logger.close()
    assert_same(read_jsonl(tmp_path / "metrics.jsonl"), expected())


def test_tensorboard(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_config(CONFIG)
    for step in range(4):
        logger.log_step(step, metrics_of(step))
    # Read before it is closed: each step has to be on disk by itself.
    assert_same(read_tensorboard(tmp_path / "tensorboard"), expected(), relative=1e-6)
    logger.close()


def test_tensorboard_shows_the_configuration_as_text(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path)
    logger.log_config(CONFIG)
    logger.close()
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    (event,) = accumulator.Tensors("config")
    assert "track_moe_metrics: true" in event.tensor_proto.string_val[0].decode()


def test_wandb_offline_says_nothing_and_reads_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logger = WandbLogger(tmp_path, "project-x", "run-y", "id-z")
    logger.log_config(CONFIG)
    for step in range(4):
        logger.log_step(step, metrics_of(step))
    logger.close()
    assert_same(read_wandb_offline(tmp_path / "wandb"), expected())
    output = capfd.readouterr()
    assert (output.out, output.err) == ("", "")
    assert logger.announcement is not None
    folder = Path(logger.announcement.rpartition("wandb sync ")[2])
    assert folder.parent == tmp_path / "wandb"
    assert len(list(folder.glob("run-*.wandb"))) == 1
    content = next(folder.glob("run-*.wandb")).read_bytes()
    assert b"project-x" in content
    assert b"run-y" in content
    assert b"track_moe_metrics" in content


KILLED_BESIDE_WANDB = """
import os, signal, sys
from pathlib import Path
from nemo_rl_moe.runs.loggers.wandb import WandbLogger
logger = WandbLogger(Path(sys.argv[1]), "p", None, "id-z")
logger.log_step(0, {"train/loss": 1.0})
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
logger.close()
"""


@pytest.mark.full
@pytest.mark.parametrize("end", ["closed", "killed"])
def test_wandb_leaves_nothing_in_the_temporary_directory(end: str, tmp_path: Path) -> None:
    """A process of its own: W&B makes its folders where it is imported."""
    temporary, run = tmp_path / "temporary", tmp_path / "run"
    temporary.mkdir()
    run.mkdir()
    command = [sys.executable, "-c", KILLED_BESIDE_WANDB, str(run), end]
    environment = os.environ | {"TMPDIR": str(temporary), "WANDB_MODE": "offline"}
    subprocess.run(command, env=environment, cwd=Path(__file__).parents[3], capture_output=True, check=end == "closed")
    assert list((run / "wandb").glob("offline-run-*")), "it has logged"
    # Of a killed process W&B's own go on for a moment.
    deadline = time.monotonic() + 300
    while any(temporary.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sorted(path.name for path in temporary.iterdir()) == []


def test_wandb_reader_joins_records_over_blocks_and_passes_over_a_cut_end(tmp_path: Path) -> None:
    logger = WandbLogger(tmp_path, "p", None, "id-z")
    keys = [f"train/moe/expert_load_layer_{layer}" for layer in range(300)]
    for step in range(1, 11):
        logger.log_step(step, dict.fromkeys(keys, step / 7))
    logger.close()
    (path,) = {path.resolve() for path in (tmp_path / "wandb").rglob("run-*.wandb")}
    content = path.read_bytes()
    assert len(content) > 3 * 32768
    wanted = {key: [(step, step / 7) for step in range(1, 11)] for key in keys}
    assert_same(read_wandb_offline(tmp_path / "wandb"), wanted)

    # A copy, which no process of W&B still writes to.
    copy = tmp_path / "copy" / path.name
    copy.parent.mkdir()
    copy.write_bytes(content[: len(content) // 2])
    steps = [step for step, _ in read_wandb_offline(copy.parent)[keys[0]]]
    assert 1 <= len(steps) < 10
    assert steps == list(range(1, len(steps) + 1))

    damaged = bytearray(content)
    damaged[1000] ^= 1
    copy.write_bytes(damaged)
    with pytest.raises(DataError, match="damaged at byte"):
        read_wandb_offline(copy.parent)


@pytest.mark.full
def test_wandb_offline_contacts_nobody(tmp_path: Path) -> None:
    """Watches every name lookup and connection of a fresh process, and how W&B's own service was started."""
    code = """
import json, os, pathlib, sys
seen = []
def watch(event, arguments):
    if event == "socket.getaddrinfo" or event == "socket.connect" and isinstance(arguments[1], tuple):
        seen.append(repr(arguments[-2:]))
    if event == "subprocess.Popen" and "wandb-core" in str(arguments[0]):
        seen.append("service" + " no-observability" * ("--no-observability" in arguments[1]))
sys.addaudithook(watch)
from nemo_rl_moe.runs.loggers.wandb import WandbLogger
logger = WandbLogger(pathlib.Path(sys.argv[1]), "p", "n", "id-z")
logger.log_step(1, {"train/loss": 1.0})
logger.close()
print(json.dumps(seen))
"""
    # W&B keeps the address of a running service in the environment; the process is to start its own.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == ["service no-observability"]


def test_wandb_is_online_only_for_a_user_who_is_logged_in(nobody_logged_in: Path) -> None:
    home = {"HOME": str(nobody_logged_in)}
    assert choose_mode(home) == "offline"
    assert choose_mode({**home, "WANDB_API_KEY": "k" * 40}) is None
    assert choose_mode({**home, "WANDB_MODE": "disabled"}) is None
    assert choose_mode({**home, "WANDB_MODE": "offline"}) is None
    with pytest.raises(RuntimeError, match=r"WANDB_MODE is 'online', but no user is logged in: run `wandb login`"):
        choose_mode({**home, "WANDB_MODE": "online"})
    (nobody_logged_in / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert choose_mode(home) is None
    assert choose_mode({**home, "WANDB_MODE": "online"}) is None
    assert choose_mode({**home, "WANDB_BASE_URL": "https://wandb.example.org"}) == "offline"


def test_mlflow_local_store(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.chdir(tmp_path)
    uri = local_store_uri(tmp_path / "logs")
    logger = MlflowLogger(uri, "experiment-x", "run-y")
    logger.log_config(CONFIG | {"long": "x" * 10_000, "many": {f"k{i}": i for i in range(250)}})
    for step in range(4):
        logger.log_step(step, metrics_of(step))
    logger.close()
    assert_same(read_mlflow(uri, "experiment-x"), expected())
    assert_same(read_mlflow(uri, "experiment-x", "run-y"), expected())

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("experiment-x")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["policy.megatron_cfg.track_moe_metrics"] == "True"
    assert run.data.params["many.k249"] == "249"
    assert run.data.params["long"] == "x" * 500

    # A second run joins the same experiment, more metrics a step than one request may carry.
    second = MlflowLogger(uri, "experiment-x", "second")
    second.log_step(1, {f"train/moe/load_{number}": float(number) for number in range(1100)})
    second.close()
    database = sqlite3.connect(tmp_path / "logs" / "mlflow.db")
    assert database.execute("select count(distinct run_uuid) from runs").fetchone() == (2,)
    assert len(read_mlflow(uri, "experiment-x", "second")) == 1100
    database.close()
    output = capfd.readouterr()
    assert (output.out, output.err) == ("", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs"]


def test_one_run_alone_makes_the_tables_of_an_mlflow_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow.tracking

    seen: list[bool] = []

    class Client(mlflow.tracking.MlflowClient):
        def get_experiment_by_name(self, name: str) -> Any:
            with (tmp_path / "mlflow.db.lock").open("a") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    seen.append(False)
                except BlockingIOError:
                    seen.append(True)
            return super().get_experiment_by_name(name)

    monkeypatch.setattr(mlflow.tracking, "MlflowClient", Client)
    for _ in range(2):
        MlflowLogger(local_store_uri(tmp_path), "experiment", "run").close()
    assert seen == [True, True]


def test_mlflow_environment_keeps_what_the_user_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "77")
    for name in ("MLFLOW_DISABLE_TELEMETRY", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"):
        # Set and removed, so that what the logger sets is undone after the test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with pytest.raises(Exception, match=r"sqlite\.nonsense"):
        MlflowLogger("sqlite+nonsense://", "x", None)
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "77"
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "2"
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"


def test_flatten_config() -> None:
    assert flatten_config(CONFIG) == {
        "policy.model_name": "tiny",
        "policy.megatron_cfg.track_moe_metrics": "True",
        "empty": "{}",
        "steps": "[1, 2]",
    }
    ((key, value),) = flatten_config({"k" * 300: "v" * 600}).items()
    assert (len(key), len(value)) == (250, 500)
