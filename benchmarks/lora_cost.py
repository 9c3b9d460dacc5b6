# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Time and memory of training with adapters, relative to training all weights.

Real trainers of one model, from the same weights, take turns in one single-threaded process on the same batches, in
another order in each round. A round's ratio divides neighbouring steps, so that other load of the machine affects both.
Two of the trainers train all weights. A ratio divides by their mean, and `full_again`, whose ratio should be 1, shows
the noise. `cpu` is the CPU time of this process. Memory is the size of tensors: weights, gradients, optimizer state,
and the most that forward passes keep for backward passes. Prints one JSON line for each model.
"""

import argparse
import json
import os
import statistics
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from moe_overhead import Contestant, median_ratio, race, random_shard
from small_model import CONFIGS, MODEL, make_parser, one_rank, positive, surroundings
from torch import Tensor, nn
from transformers import Qwen3MoeConfig

from nemo_rl_moe.config.loading import load_config
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer

# isort: split
from megatron.core.optimizer import ChainedOptimizer

MODELS: dict[str, dict[str, int]] = {
    "tiny": {},
    "wide": {
        "hidden_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 256,
        "intermediate_size": 512,
    },
}
"""Changes to the small model, which has 4 layers, 8 experts, top 2 and hidden size 128."""
FULL, FULL_AGAIN = "full", "full_again"
EXPERTS = {"lora": "per_expert", "lora_shared": "shared", "lora_attention": "none"}
"""Name of a trainer with adapters to `policy.lora.experts`."""
ATTENTION = "policy.lora.targets=[q_proj,k_proj,v_proj,o_proj]"


@dataclass(frozen=True)
class Memory:
    """Bytes of a trainer's tensors.

    Attributes:
        saved: The most that forward passes keep for backward passes.
    """

    weights: int
    gradients: int
    optimizer: int
    saved: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.saved


class SavedBytes:
    """Bytes that autograd keeps, each storage once, without parameters.

    Attributes:
        most: Largest count so far.
    """

    def __init__(self, parameters: Iterator[nn.Parameter]):
        self._own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._holders: Counter[int] = Counter()
        self._now = self.most = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count in the body."""
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept.tensor):
            yield

    def _keep(self, tensor: Tensor) -> "_Kept":
        kept, storage = _Kept(tensor), tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if place not in self._own:
            self._holders[place] += 1
            if self._holders[place] == 1:
                self._now += size
                self.most = max(self.most, self._now)
            weakref.finalize(kept, self._release, place, size)
        return kept

    def _release(self, place: int, size: int) -> None:
        self._holders[place] -= 1
        if self._holders[place] == 0:
            self._now -= size


class _Kept:
    def __init__(self, tensor: Tensor):
        self.tensor = tensor


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=positive, default=40, help="measured steps of each trainer (default: 40)")
    parser.add_argument("--warmup", type=positive, default=3, help="steps of each before these (default: 3)")
    parser.add_argument("--rank", type=positive, default=8, help="of the adapters (default: 8)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="(default: all)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for model in options.models:
        print(json.dumps(measure(model, options)), flush=True)


def measure(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the printed ratios of one model."""
    config = Qwen3MoeConfig(**{**MODEL, **MODELS[model]})
    policies = {name: make_policy(name, options.rank) for name in (FULL, FULL_AGAIN, *EXPERTS)}
    with one_rank(policies[FULL]):
        trainers = {
            name: MegatronTrainer(policy, config, None, num_steps=options.warmup + options.rounds + 1)
            for name, policy in policies.items()
        }
        contestants = {name: Contestant(trainer) for name, trainer in trainers.items()}
        race(list(contestants.values()), policies[FULL], options.warmup, options.rounds)
        memory = {name: memory_of(each, policies[FULL]) for name, each in contestants.items()}
    compared = [name for name in contestants if name != FULL]
    return {
        "benchmark": "lora_cost",
        "model": model,
        "step_to_full": {name: step_ratios(contestants, name) for name in compared},
        "memory_to_full": {name: memory_ratios(memory[name], memory[FULL]) for name in compared},
        "megabytes_of_full": {name: round(size / 1e6, 3) for name, size in vars(memory[FULL]).items()},
        "seconds_per_step": {name: round(statistics.median(each.wall), 5) for name, each in contestants.items()},
        "trained_parameters": {name: num_trained(trainer) for name, trainer in trainers.items()},
        "rank": options.rank,
        "rounds": options.rounds,
        "threads": torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)),
        **surroundings(),
    }


def make_policy(name: str, rank: int) -> PolicyConfig:
    """Return the policy of the demo on one rank, with adapters if the name is in `EXPERTS`."""
    overrides = ["cluster.cpu_workers_per_node=1", "policy.init=random"]
    if name not in EXPERTS:
        return load_config(CONFIGS / "sft_tiny_moe.yaml", overrides, check_paths=False).policy
    overrides += [f"policy.lora.rank={rank}", f"policy.lora.experts={EXPERTS[name]}"]
    overrides += [ATTENTION] if EXPERTS[name] == "none" else []
    return load_config(CONFIGS / "sft_tiny_moe_lora.yaml", overrides, check_paths=False).policy


def parameters_of(trainer: MegatronTrainer) -> Iterator[nn.Parameter]:
    """Yield weights and factors."""
    return (parameter for chunk in trainer.chunks for parameter in chunk.parameters())


def num_trained(trainer: MegatronTrainer) -> int:
    """Return the number of trained parameters."""
    return sum(parameter.numel() for parameter in parameters_of(trainer) if parameter.requires_grad)


def memory_of(contestant: Contestant, policy: PolicyConfig) -> Memory:
    """Return the bytes of a trainer's tensors. Takes one more step to measure saved activations."""
    trainer = contestant.trainer
    saved = SavedBytes(parameters_of(trainer))
    with saved.counted():
        contestant.step(random_shard(policy, seed=0), measured=False)
    trained = [parameter for parameter in parameters_of(trainer) if parameter.requires_grad]
    whole = trainer.optimizer
    optimizers = whole.chained_optimizers if isinstance(whole, ChainedOptimizer) else [whole]
    states = [state for each in optimizers for state in each.optimizer.state.values()]
    return Memory(
        weights=sum(parameter.nbytes for parameter in parameters_of(trainer)),
        gradients=sum(parameter.main_grad.nbytes for parameter in trained),  # type: ignore[attr-defined]
        optimizer=sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor)),
        saved=saved.most,
    )


def step_ratios(contestants: dict[str, Contestant], name: str) -> dict[str, dict[str, float]]:
    """Return the time of a trainer's steps over steps that train all weights, wall-clock and CPU."""
    full, again, own = contestants[FULL], contestants[FULL_AGAIN], contestants[name]
    if name == FULL_AGAIN:
        return {"wall": median_ratio(again.wall, full.wall), "cpu": median_ratio(again.cpu, full.cpu)}
    wall = [statistics.mean(pair) for pair in zip(full.wall, again.wall, strict=True)]
    cpu = [statistics.mean(pair) for pair in zip(full.cpu, again.cpu, strict=True)]
    return {"wall": median_ratio(own.wall, wall), "cpu": median_ratio(own.cpu, cpu)}


def memory_ratios(memory: Memory, full: Memory) -> dict[str, float]:
    """Return a trainer's bytes over the bytes of training all weights."""
    found = {name: round(size / vars(full)[name], 4) for name, size in vars(memory).items()}
    return found | {"total": round(memory.total / full.total, 4)}


if __name__ == "__main__":
    main()
