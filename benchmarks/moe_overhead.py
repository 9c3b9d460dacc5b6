# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Cost of MoE metrics: the same training steps with tracking off, brief and detailed. Prints one JSON line.

Real trainers of the demo's model, from the same weights, take turns in one process on the same batches, in another
order in each round. A round's ratio divides neighbouring steps, so that other load of the machine affects both. Two of
the trainers do not track. A ratio divides by their mean, and `off_again_to_off`, which should be 1, shows the noise.
`cpu` is the CPU time of this process, which other processes disturb less than the wall-clock time.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from small_model import CONFIGS, REPOSITORY, one_rank
from transformers import AutoConfig

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.loading import load_config
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import GlobalBatchShard, TokenBatch, make_shard
from nemo_rl_moe.models.megatron.model.releases import MEGATRON_VERSION, clear_auxiliary_losses
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer

# Lengths of the demo's samples, tokens: a sum, with or without its working, in the chat template.
SHORTEST, LONGEST = 14, 46
LIMIT = 1.01
_OFF = {"track_moe_metrics": False, "moe_per_layer_logging": False}
MODES: dict[str, dict[str, Any]] = {
    "off": _OFF,
    "off_again": _OFF,
    "brief": {"moe_metrics.mode": "brief"},
    "detailed": {"moe_metrics.mode": "detailed"},
}


@dataclass
class Contestant:
    """One trainer and its measurements.

    Attributes:
        wall: Wall-clock seconds of each measured step.
        cpu: CPU seconds of this process.
        num_metrics: Number of MoE metrics of a step.
    """

    trainer: MegatronTrainer
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    num_metrics: int = 0

    def step(self, shard: GlobalBatchShard, *, measured: bool) -> None:
        """Time one step."""
        wall, cpu = time.perf_counter(), time.process_time()
        result = self.trainer.train([shard], sft_loss)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        # The process has one record of the routers' auxiliary losses, which is only cleared with tracking.
        clear_auxiliary_losses()
        self.losses.append(result.global_loss)
        self.num_metrics = len(result.moe_metrics)
        if measured:
            self.wall.append(wall)
            self.cpu.append(cpu)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="measured steps of each mode (default: 60)")
    parser.add_argument("--warmup", type=int, default=3, help="steps of each before these (default: 3)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    policies = {mode: make_policy(changes) for mode, changes in MODES.items()}
    with one_rank(policies["off"]):
        contestants = {mode: Contestant(make_trainer(policy)) for mode, policy in policies.items()}
        race(list(contestants.values()), policies["off"], options.warmup, options.rounds)
    off, again = contestants["off"], contestants["off_again"]
    wall = [statistics.mean(pair) for pair in zip(off.wall, again.wall, strict=True)]
    cpu = [statistics.mean(pair) for pair in zip(off.cpu, again.cpu, strict=True)]
    losses = {tuple(contestant.losses) for contestant in contestants.values()}
    result: dict[str, Any] = {"benchmark": "moe_overhead", "limit": LIMIT}
    for mode in ("brief", "detailed"):
        result[f"{mode}_to_off"] = {
            "wall": median_ratio(contestants[mode].wall, wall),
            "cpu": median_ratio(contestants[mode].cpu, cpu),
        }
    result["off_again_to_off"] = {"wall": median_ratio(again.wall, off.wall), "cpu": median_ratio(again.cpu, off.cpu)}
    result |= {
        "seconds_per_step": {mode: round(statistics.median(each.wall), 5) for mode, each in contestants.items()},
        "moe_metrics_per_step": {mode: each.num_metrics for mode, each in contestants.items()},
        "losses_identical": len(losses) == 1,
        "rounds": options.rounds,
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),
        "megatron_core": MEGATRON_VERSION,
        "torch": torch.__version__,
    }
    print(json.dumps(result))


def make_policy(changes: dict[str, Any]) -> PolicyConfig:
    """Return the demo's policy on one rank."""
    overrides = ["cluster.cpu_workers_per_node=1"]
    overrides += [f"policy.megatron_cfg.{name}={json.dumps(value)}" for name, value in changes.items()]
    return load_config(CONFIGS / "sft_tiny_moe.yaml", overrides, check_paths=False).policy


def make_trainer(policy: PolicyConfig) -> MegatronTrainer:
    """Return a trainer of the demo's model. All trainers have the same weights."""
    return MegatronTrainer(policy, AutoConfig.from_pretrained(REPOSITORY / policy.model_name), None, num_steps=200)


def race(contestants: Sequence[Contestant], policy: PolicyConfig, warmup: int, rounds: int) -> None:
    """Let all train the same batch in each round."""
    order = Random(0)
    for number in range(-warmup, rounds):
        shard = random_shard(policy, seed=number + warmup)
        for contestant in order.sample(contestants, k=len(contestants)):
            contestant.step(shard, measured=number >= 0)


def random_shard(policy: PolicyConfig, seed: int) -> GlobalBatchShard:
    """Return a global batch of random tokens with the lengths of the demo's samples."""
    generator = torch.Generator().manual_seed(seed)
    size, rows = policy.train_global_batch_size, policy.train_micro_batch_size
    lengths = torch.randint(SHORTEST, LONGEST + 1, (size,), generator=generator)
    real = torch.arange(LONGEST)[None] < lengths[:, None]
    batch = TokenBatch(
        input_ids=torch.randint(1, 40, (size, LONGEST), generator=generator) * real,
        lengths=lengths,
        token_mask=real,
        sample_ids=tuple(f"random:{index}" for index in range(size)),
    )
    return make_shard(batch, [range(first, first + rows) for first in range(0, size, rows)], batch)


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, float]:
    """Return the median of the rounds' ratios, and its 95% confidence interval."""
    ratios = sorted(above / below for above, below in zip(numerators, denominators, strict=True))
    # Order statistics: the number of rounds below the true median is binomial with p = 1/2.
    margin = 0.98 * len(ratios) ** 0.5
    low, high = max(int(len(ratios) / 2 - margin), 0), min(int(len(ratios) / 2 + margin), len(ratios) - 1)
    return {
        "median": round(statistics.median(ratios), 4),
        "low": round(ratios[low], 4),
        "high": round(ratios[high], 4),
    }


if __name__ == "__main__":
    main()
