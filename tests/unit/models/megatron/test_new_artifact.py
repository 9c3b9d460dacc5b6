# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A metric with an array of its own is an observer and an artifact: everything between them knows neither.

`docs/adding-a-metric.md` shows both.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.algorithms.sft import train_sft
from nemo_rl_moe.algorithms.step_recorder import RecordSinks, StepRecorder
from nemo_rl_moe.checkpoints.state import LoopState
from nemo_rl_moe.config.schema import SFTConfig
from nemo_rl_moe.distributed.batch import GlobalBatchShard, TokenBatch
from nemo_rl_moe.errors import UserCodeError
from nemo_rl_moe.models.interfaces import LossFunction, TrainResult
from nemo_rl_moe.models.megatron.training.step_observer import StepObservations, StepObserver, TrainingForward
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from nemo_rl_moe.models.rank_results import RankTrainResult
from nemo_rl_moe.runs.folder.step_tables import StepTable, StepTableWriter, read_steps
from nemo_rl_moe.runs.loggers.artifacts import ARTIFACTS, ArtifactKind, ArtifactTables
from nemo_rl_moe.runs.loggers.console import Notices
from nemo_rl_moe.runs.loggers.fan_out import FanOutLogger
from nemo_rl_moe.runs.loggers.isolated import IsolatedLogger, Patience
from nemo_rl_moe.runs.loggers.plots import as_png, new_figure
from nemo_rl_moe.runs.loggers.rewind import rewind_run_folder
from nemo_rl_moe.runs.loggers.step_plots import StepPlots
from tests.support.gloo_ranks import run_ranks
from tests.support.loggers import ListBackend
from tests.support.tiny_model import parallel_job, shard_of_rank, tiny_batch, tiny_hf_config, tiny_policy

NAME = "tokens_of_updates"


class TokensOfUpdates(StepObserver):
    """Tokens of this rank in each update of a step."""

    def start_step(self, number: int, shards: Sequence[GlobalBatchShard]) -> None:
        self._tokens: list[int] = []

    def start_global_batch(self, shard: GlobalBatchShard, loss_function: LossFunction) -> None:
        self._tokens.append(0)

    @contextmanager
    def training_forward(self, forward: TrainingForward) -> Iterator[None]:
        yield
        if forward.chunk == 0:  # with interleaved stages a microbatch runs through several
            self._tokens[-1] += int(forward.microbatch.batch.lengths.sum())

    def end_step(self) -> StepObservations:
        numbers = {"tokens_of_last_update": self._tokens[-1]}
        return StepObservations(numbers, {NAME: np.array(self._tokens)})


TABLE = StepTable(f"{NAME}.parquet", ("step", "update"), {"tokens": pa.int64()})


class TokensWriter(StepTableWriter[np.ndarray]):
    """Writer of the tokens of each update."""

    table = TABLE

    def write(self, step: int, artifact: np.ndarray) -> None:
        self.add(step, (range(len(artifact)),), {"tokens": artifact})


def plot_tokens(step: int, tokens: np.ndarray) -> Mapping[str, bytes]:
    figure = new_figure((600, 400))
    axes = figure.add_subplot(xlabel="update", ylabel="tokens", title=f"step {step}")
    axes.bar(range(len(tokens)), tokens)
    return {f"plots/{NAME}": as_png(figure)}


KIND = ArtifactKind(NAME, TokensWriter, plot_tokens)


def steps_of_rank(num_steps: int) -> list[RankTrainResult]:
    """Steps of two updates each; an evaluation before each does not count."""
    policy = tiny_policy(1)
    with parallel_job(policy):
        trainer = MegatronTrainer(policy, tiny_hf_config(), None, num_steps=10)
        trainer.observers.append(TokensOfUpdates())
        results = []
        for step in range(num_steps):
            shards = [shard_of_rank(tiny_batch(2 * step + update)) for update in range(2)]
            trainer.evaluate(shards[0], sft_loss)
            results.append(trainer.train(shards, sft_loss))
        return results


class Replayed:
    """A policy whose steps have been trained already."""

    def __init__(self, results: list[RankTrainResult]):
        self._results = iter(results)

    def train(self, batch: TokenBatch, loss_function: LossFunction) -> TrainResult:
        found = next(self._results)
        return TrainResult(
            found.global_loss, found.grad_norm, found.lr, 1, 1, {}, found.moe_metrics, artifacts=found.artifacts
        )


class Batches:
    """An epoch of three batches."""

    def __len__(self) -> int:
        return 3

    def epoch(self, epoch_index: int, first_batch: int = 0) -> Iterator[TokenBatch]:
        yield from map(tiny_batch, range(3))


def test_it_is_written_and_plotted_and_rewound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (results,) = run_ranks(steps_of_rank, 1, 3)
    monkeypatch.setitem(ARTIFACTS, NAME, KIND)
    backend, notices = ListBackend(), Notices(pytest.fail, pytest.fail)
    # The first plot imports matplotlib, which takes long on a busy machine.
    patience = Patience(most_plots_waiting=99, silence_s=200, closing_s=200)
    isolated = IsolatedLogger("x", backend.open, notices, patience=patience)
    loggers = FanOutLogger([], notices, [isolated], closing_s=200, plots=StepPlots(2, notices))
    config = SFTConfig(
        max_num_epochs=1, max_num_steps=3, val_period=0, val_batches=None, val_at_start=False, val_at_end=False, seed=0
    )
    with loggers, closing(ArtifactTables(tmp_path, pytest.fail)) as tables:

        def log_artifact(step: int, name: str, artifact: Any) -> None:
            tables.write(step, name, artifact)
            loggers.log_artifact(step, name, artifact)

        recorder = StepRecorder(RecordSinks(loggers, log_artifact), None, lambda: None, 3, LoopState())
        policy: Any = Replayed(results)
        train_sft(config, policy, Batches(), None, recorder)

    expected = [[int(tiny_batch(2 * step + update).lengths.sum()) for update in range(2)] for step in range(3)]
    found = read_steps(TABLE, tmp_path)
    assert found.values["tokens"].tolist() == expected
    assert [step for step, _ in backend.steps] == [1, 2, 3]
    assert [metrics["train/moe/tokens_of_last_update"] for _, metrics in backend.steps] == [of[1] for of in expected]
    key = f"plots/{NAME}"
    plotted = {step: plots[key] for step, plots in backend.plots.items() if key in plots}
    assert plotted == {step: plot_tokens(step, np.array(expected[step - 1]))[key] for step in (1, 2)}
    rewind_run_folder(tmp_path, 2)
    assert read_steps(TABLE, tmp_path).axes[0].tolist() == [1, 2]


def test_an_artifact_that_is_not_registered_is_named(tmp_path: Path) -> None:
    with closing(ArtifactTables(tmp_path, pytest.fail)) as tables, pytest.raises(UserCodeError) as error:
        tables.write(3, "expert_laod", np.zeros(3))
    assert str(error.value) == (
        "ARTIFACTS in nemo_rl_moe/runs/loggers/artifacts.py has no 'expert_laod', which an observer of step 3 returned;"
        " did you mean expert_load?"
    )
