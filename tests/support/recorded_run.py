# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A whole run of GRPO on two GPUs that are not there: all of it is real but Ray, its workers, engine and reward
function."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from nemo_rl_moe.checksums import write_inventory
from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.distributed.batch import GlobalBatchShard
from nemo_rl_moe.distributed.run_process import StopSignals
from nemo_rl_moe.generation.registry import EngineSetup
from nemo_rl_moe.launch import early_start, environments, grpo
from nemo_rl_moe.launch.start import RunLaunch
from nemo_rl_moe.launch.training_run import TrainingRun
from nemo_rl_moe.metrics import MetricSeries, Reduction
from nemo_rl_moe.models.megatron.training.megatron_model import MegatronModel
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from nemo_rl_moe.models.policy import model_workers
from nemo_rl_moe.models.rank_results import RankDescription, RankTrainResult
from nemo_rl_moe.weight_sync.transport import WeightTransport
from tests.functional import grpo_runs, sft_runs
from tests.support.grpo_fakes import FakeEngine, FakeRewardFunction

NUM_RANKS = 2
_calls: list[str] = []
"""Calls of the run that goes on, in their order."""


class RecordedWorkers:
    """Workers of two ranks: each call of all of them is noted by its method."""

    def __init__(self) -> None:
        _calls.append("start workers")
        self.num_updates = 0

    def call_all(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call all ranks, as `WorkerGroup` does."""
        places = [SimpleNamespace(data_parallel_rank=n, data_parallel_size=2, reports_loss=True) for n in (0, 1)]
        if method == MegatronModel.describe:
            return [RankDescription(coordinates=place) for place in places]
        if method == MegatronModel.save_weights:
            arguments[0].mkdir(parents=True, exist_ok=True)
            write_inventory(arguments[0])
            return [[] for _ in places]
        if method == MegatronTrainer.load_checkpoint:
            _calls.append(method.__name__)
            return [self.num_updates for _ in places]
        if method not in (MegatronTrainer.checkpoint_is_written, MegatronTrainer.finish_checkpoint):
            _calls.append(method.__name__)
        return [True if method == MegatronTrainer.checkpoint_is_written else None for _ in places]

    def start_each(
        self, method: Callable[..., Any], arguments: Sequence[tuple[Any, ...] | None]
    ) -> Callable[[], dict[int, RankTrainResult]]:
        """Start a call of each rank, as `WorkerGroup` does."""
        assert None not in arguments, "every rank enters"
        assert method == MegatronTrainer.train
        _calls.append(method.__name__)
        self.num_updates += 1
        return lambda: {rank: self._trained(*given) for rank, given in enumerate(arguments) if given is not None}

    def shutdown(self) -> None:
        """End the ranks, as `WorkerGroup` does."""

    def _trained(self, shards: Sequence[GlobalBatchShard], _: object) -> RankTrainResult:
        return RankTrainResult(
            global_loss=0.5,
            grad_norm=1.0,
            lr=1e-3,
            num_microbatches=1,
            microbatch_metrics={"loss": MetricSeries((0.25,), Reduction.SHARE)},
            moe_metrics={},
            num_updates=1,
            num_skipped_updates=0,
            skipped_in_a_row=0,
            weight_version=self.num_updates,
            memory={},
        )


class RecordedEngine(FakeEngine):
    """An engine with a copy of the weights, on the trainer's GPUs."""

    def update_weights(self, transport: WeightTransport, version: int) -> None:  # type: ignore[override]
        self.diary.append("weights arrive")
        self.weight_version = version

    def sleep(self) -> None:
        self.diary.append("engine sleeps")

    def wake(self) -> None:
        self.diary.append("engine wakes")

    def shutdown(self) -> None:
        self.diary.append("engine ends")


def make_engine(_: EngineSetup) -> RecordedEngine:
    _calls.append("engine starts")
    return RecordedEngine(_calls, shares_weights=False)


class EndingRewardFunction(FakeRewardFunction):
    def shutdown(self) -> None:
        """Nothing runs."""


def recorded_run(folder: Path, **changes: Any) -> list[str]:
    """Run GRPO from its entry point, and again what has been saved in the folder; calls in their order.

    Args:
        folder: Of prompts, checkpoints and logs.
        changes: Keys of the configuration; two underscores for a dot.
    """
    chosen: dict[str, Any] = {
        "grpo__max_num_steps": 1,
        "grpo__val_period": 0,
        "grpo__val_at_start": False,
        "grpo__val_at_end": False,
        "checkpointing__checkpoint_dir": folder / "checkpoints",
        "checkpointing__save_period": 1,
        "checkpointing__metric_name": None,
        "policy__generation__backend": f"{__name__}:make_engine",
        "policy__generation__refit_check__enabled": False,
        "cluster__gpus_per_node": NUM_RANKS,
        **sft_runs.only_jsonl(),
    }
    overrides = grpo_runs.settings(folder, grpo_runs.make_prompts(folder / "data", 40), **chosen | changes)
    config = load_grpo_config(str(grpo_runs.EXEMPLAR), overrides)
    _calls.clear()
    with _without_ray(config.cluster), TrainingRun(config, RunLaunch("run"), StopSignals()) as run:
        grpo.run_grpo(config, run)
    return list(_calls)


@contextmanager
def _without_ray(cluster_config: Any) -> Iterator[None]:
    cluster = SimpleNamespace(config=cluster_config, is_local=True, shutdown=lambda: None, let_die=lambda: None)
    with (
        patch.object(early_start, "RayCluster", lambda config, stored_bytes: cluster),
        patch.object(model_workers, "WorkerGroup", lambda *args, **options: RecordedWorkers()),
        patch.object(environments, "RewardWorkers", lambda reward, env: EndingRewardFunction()),
        patch.object(
            environments, "FaultWatch", lambda *args, **options: SimpleNamespace(observe=lambda trajectories: None)
        ),
    ):
        yield
