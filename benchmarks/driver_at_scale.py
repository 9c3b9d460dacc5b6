# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Traffic, time and memory of the driver in one step with 16, 64, 256 and 1,024 ranks. Prints one JSON line.

The driver's code plans a GRPO step's log-probability and training calls (tensor parallel 4, pipeline parallel 2). Fake
ranks take the arguments, pickled like in Ray, and answer with results of the real size: 48 MoE layers with 128 experts,
per-layer metrics, a load matrix from rank 0. The global batch is always 1,024 responses of 512 to 8,192 tokens. Ray's
handling of that many actors is not included.
"""

import argparse
import json
import pickle
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from ray import cloudpickle
from small_model import CONFIGS, TOKENIZER

from nemo_rl_moe.algorithms.losses.policy_gradient import PolicyGradientLoss
from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.distributed.batch import TokenBatch, per_sequence, per_token
from nemo_rl_moe.distributed.worker_group import SMALL_TYPES
from nemo_rl_moe.metrics import MetricSeries, Reduction
from nemo_rl_moe.models.hf_files import find_model
from nemo_rl_moe.models.megatron.training.megatron_model import MegatronModel
from nemo_rl_moe.models.policy import lm_policy, model_workers
from nemo_rl_moe.models.rank_results import ParallelCoordinates, RankDescription, RankTrainResult
from nemo_rl_moe.routing.metrics.load_statistics import ExpertLoad
from nemo_rl_moe.runs.folder.artifacts import EXPERT_LOAD

TENSOR, PIPELINE = 4, 2
LAYERS, EXPERTS, METRICS_PER_LAYER, METRICS_OF_LOSS = 48, 128, 12, 40
SEQUENCES, SHORTEST, LONGEST = 1024, 512, 8192
RANKS = (16, 64, 256, 1024)


@dataclass
class Traffic:
    """Bytes that the driver sends and receives."""

    sent: int = 0
    received: int = 0


@dataclass
class FakeRanks:
    """Fake `WorkerGroup`, which takes pickled arguments and answers with pickled results.

    Attributes:
        seconds: CPU time of the answers, which the driver does not spend.
    """

    world_size: int
    traffic: Traffic = field(default_factory=Traffic)
    seconds: float = 0.0

    @cached_property
    def _coordinates(self) -> list[ParallelCoordinates]:
        copies = self.world_size // (TENSOR * PIPELINE)
        return [
            ParallelCoordinates(
                rank // TENSOR % copies,
                copies,
                stage := rank // (TENSOR * copies),
                rank % TENSOR,
                stage == PIPELINE - 1,
            )
            for rank in range(self.world_size)
        ]

    def call_all(self, method: Callable[..., Any], *_: Any) -> list[RankDescription]:
        """Return the descriptions of the ranks."""
        assert method == MegatronModel.describe
        return [RankDescription(coordinates=place) for place in self._coordinates]

    def start_each(
        self, method: Callable[..., Any], args_by_rank: Sequence[Sequence[Any]]
    ) -> Callable[[], dict[int, Any]]:
        """Count the bytes that are sent, each object once like in Ray's object store, and make the answers."""
        sent: dict[int, bytes] = {}
        for args in args_by_rank:
            for arg in args:
                if id(arg) not in sent:
                    sent[id(arg)] = cloudpickle.dumps(arg)
                self.traffic.sent += len(sent[id(arg)]) if isinstance(arg, SMALL_TYPES) else 0
        self.traffic.sent += sum(map(len, sent.values()))
        start = time.process_time()
        results = [pickle.dumps(self._answer(method, rank, args[0])) for rank, args in enumerate(args_by_rank)]

        self.seconds += time.process_time() - start

        def received() -> dict[int, Any]:
            self.traffic.received += sum(map(len, results))
            return {rank: pickle.loads(result) for rank, result in enumerate(results)}  # noqa: S301  (made above)

        return received

    def _answer(self, method: Callable[..., Any], rank: int, share: Any) -> Any:
        place = self._coordinates[rank]
        if method == MegatronModel.logprobs:
            return [torch.zeros(batch.input_ids.shape) for batch in share] if place.reports_loss else []
        (shard,) = share
        series = MetricSeries((0.5,) * len(shard.microbatches), Reduction.SHARE)
        moe_metrics = {
            f"some_metric_of_a_name_{number}_layer_{layer}": 0.5
            for layer in range(LAYERS)
            for number in range(METRICS_PER_LAYER)
        }
        load = ExpertLoad(tuple(range(LAYERS)), torch.zeros(LAYERS, EXPERTS, dtype=torch.long))
        artifacts = {EXPERT_LOAD.name: load}
        of_loss = {f"metric_{number}": series for number in range(METRICS_OF_LOSS)} if place.reports_loss else {}
        reported = (moe_metrics, artifacts) if rank == 0 else ({}, {})
        return RankTrainResult(0.5, 1.0, 1e-6, len(shard.microbatches), of_loss, reported[0], 1, 0, 0, 1, reported[1])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    torch.set_num_threads(1)
    batch = make_batch()
    rows = [measure(world_size, batch) for world_size in RANKS]
    print(json.dumps({"name": "driver_at_scale", "tokens": int(batch.lengths.sum()), "ranks": rows}))


def make_batch() -> TokenBatch:
    """Return a step's responses with the columns for GRPO's loss."""
    generator = np.random.default_rng(0)
    lengths = torch.from_numpy(generator.integers(SHORTEST, LONGEST, SEQUENCES))
    shape = (SEQUENCES, int(lengths.max()))
    trained = torch.arange(shape[1]) < lengths[:, None]
    numbers = torch.zeros(shape)
    return TokenBatch(
        input_ids=torch.zeros(shape, dtype=torch.long),
        lengths=lengths,
        token_mask=trained,
        sample_ids=tuple(f"data:{number // 16}" for number in range(SEQUENCES)),
    ).with_columns(
        advantages=per_sequence(torch.zeros(SEQUENCES)),
        generation_logprobs=per_token(numbers),
        previous_logprobs=per_token(numbers.clone()),
    )


def measure(world_size: int, batch: TokenBatch) -> dict[str, float]:
    """Measure one step of the driver."""
    overrides = [
        f"policy.model_name={TOKENIZER}",
        "policy.init=random",
        "grpo.num_prompts_per_step=64",
        "grpo.num_generations_per_prompt=16",
        f"policy.train_global_batch_size={SEQUENCES}",
        "policy.train_micro_batch_size=1",
        "policy.logprob_batch_size=1",
        f"policy.max_total_sequence_length={LONGEST}",
    ]
    config = load_grpo_config(CONFIGS / "grpo_tiny_moe.yaml", overrides, check_paths=False)
    seconds, _, traffic = _step(config, batch, FakeRanks(world_size), traced=False)
    # In a separate step, since tracing memory takes time.
    _, peak, _ = _step(config, batch, FakeRanks(world_size), traced=True)
    return {
        "ranks": world_size,
        "sent_mb": round(traffic.sent / 1e6, 1),
        "received_mb": round(traffic.received / 1e6, 1),
        "cpu_seconds": round(seconds, 2),
        "peak_mb_of_python": round(peak / 1e6, 1),
    }


def _step(config: GRPOMasterConfig, batch: TokenBatch, ranks: FakeRanks, *, traced: bool) -> tuple[float, int, Traffic]:
    """Return the CPU time, memory and traffic of one step."""
    cluster: Any = SimpleNamespace(config=config.cluster)
    loss, peak = PolicyGradientLoss(config.loss_fn, prev_is_current=False), 0
    with patch.object(model_workers, "WorkerGroup", lambda *_, **__: ranks):
        policy = lm_policy.MegatronPolicy(
            config, cluster, seed=0, num_steps=1, source=find_model(config.policy), model_files={}
        )
    if traced:
        tracemalloc.start()
    start = time.process_time()
    policy.logprobs(batch)
    policy.train(batch, loss)
    seconds = time.process_time() - start - ranks.seconds
    if traced:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return seconds, peak, ranks.traffic


if __name__ == "__main__":
    main()
