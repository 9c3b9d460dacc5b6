# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokens a second of generation by the training workers' engine on one CPU core. Prints one JSON line.

The engine runs on a small Qwen3-MoE (4 layers, 8 experts, top 2) in turns with the same model written in plain PyTorch
with a key-value cache, all in one process, so that whatever else the machine does slows both. Both draw tokens and
compute their log-probabilities with the same function. With --with-vllm an engine of vLLM runs in turns with them, on
the same weights, as `policy.generation.backend: vllm` starts it: in a process of its own, with one thread.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from plain_model import PlainModel
from small_model import CONFIGS, MODEL, VOCABULARY, add_layer_spec, make_parser, one_rank, positive, surroundings
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from nemo_rl_moe.config.loading import load_config, load_grpo_config
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.generation.interface import GenerationBatch, GenerationEngine, GenerationRequest, SamplingParameters
from nemo_rl_moe.generation.lockstep import generate_all
from nemo_rl_moe.generation.refit import refit
from nemo_rl_moe.generation.registry import EngineSetup, make_engine
from nemo_rl_moe.models.hf_files import ModelSource
from nemo_rl_moe.models.megatron.generation import MegatronGenerator
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from nemo_rl_moe.models.megatron.weights.hf_export import tensors_of_this_rank
from nemo_rl_moe.weight_sync.folder import FolderTransport, folder_of_one_machine

EXAMPLES = """\
examples:
  python benchmarks/generation_throughput.py
  python benchmarks/generation_throughput.py --with-transformers     transformers' generate as well
  python benchmarks/generation_throughput.py --with-vllm             vLLM as well (make vllm)
  python benchmarks/generation_throughput.py --layer-spec local      Megatron-Core's own modules, for comparison
  taskset -c 0 python benchmarks/generation_throughput.py            on one core

On a busy machine tokens a second say little: compare ratios, which are of runs next to each other."""

Run = Callable[[], Tensor]


@dataclass
class Contestant:
    """One way to generate, and the seconds of its rounds."""

    run: Run
    seconds: list[float] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    torch.set_num_threads(1)
    policy = make_policy(options.layer_spec)
    with one_rank(policy), ExitStack() as stack:
        hf_config = Qwen3MoeConfig(**MODEL, architectures=["Qwen3MoeForCausalLM"])
        trainer = MegatronTrainer(policy, hf_config, None, num_steps=1)
        contestants = make_contestants(trainer, options, stack)
        # Greedy needs no random numbers: there everyone must find the same.
        expected = contestants["plain_greedy"].run()
        agreement = {
            name: round(float((contestant.run() == expected).float().mean()), 4)
            for name, contestant in contestants.items()
            if name.endswith("greedy")
        }
        race(contestants, options.rounds)
    tokens = options.prompts * options.new_tokens
    result = {
        "name": "generation_throughput",
        "tokens_per_second": {name: speeds(contestant, tokens) for name, contestant in contestants.items()},
        "to_plain": ratios(contestants, "plain"),
        "to_transformers": ratios(contestants, "transformers") if options.with_transformers else None,
        "to_vllm": ratios(contestants, "vllm") if options.with_vllm else None,
        "same_greedy_tokens_as_plain": agreement,
        "prompts": options.prompts,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "rounds": options.rounds,
        "threads": torch.get_num_threads(),
        "layer_spec": options.layer_spec,
        "model": MODEL | {"precision": "float32"},
        **surroundings(),
    }
    print(json.dumps(result))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, EXAMPLES)
    parser.add_argument("--rounds", type=positive, default=10, metavar="N", help="measured rounds (default: 10)")
    parser.add_argument("--prompts", type=positive, default=32, metavar="N", help="sequences at a time (default: 32)")
    parser.add_argument("--prompt-tokens", type=positive, default=32, metavar="N", help="of each (default: 32)")
    parser.add_argument("--new-tokens", type=positive, default=64, metavar="N", help="of each (default: 64)")
    parser.add_argument("--with-transformers", action="store_true", help="run transformers' generate as well")
    parser.add_argument("--with-vllm", action="store_true", help="run an engine of vLLM as well")
    add_layer_spec(parser)
    return parser.parse_args(arguments)


def make_policy(layer_spec: str) -> PolicyConfig:
    """Return the demo's policy with this benchmark's model."""
    overrides = [
        f"policy.megatron_cfg.layer_spec={layer_spec}",
        "policy.max_total_sequence_length=4096",
        "policy.init_seed=1",
    ]
    return load_config(CONFIGS / "sft_tiny_moe.yaml", overrides, check_paths=False).policy


def make_contestants(trainer: MegatronTrainer, options: argparse.Namespace, stack: ExitStack) -> dict[str, Contestant]:
    """Return the engine and the others, sampling at temperature 1 and greedy, all with the same weights."""
    prompts = np.random.default_rng(0).integers(VOCABULARY, size=(options.prompts, options.prompt_tokens))
    rows, count = torch.from_numpy(prompts), options.new_tokens
    weights = dict(tensors_of_this_rank(trainer.chunks, trainer.config, trainer.hf_config))
    plain = PlainModel(weights, trainer.hf_config, options.prompt_tokens + count)
    engine = MegatronGenerator(trainer.chunks, trainer.config, None, trainer.device)
    contestants = {}
    for name, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        how = SamplingParameters(max_new_tokens=count, temperature=temperature)
        contestants[f"engine_{name}"] = Contestant(engine_run(engine, prompts, how))
        contestants[f"plain_{name}"] = Contestant(partial(plain.generate, rows, how))
    if options.with_transformers:
        model = transformers_model(weights, trainer.hf_config)
        for name, sampled in (("sampled", True), ("greedy", False)):
            contestants[f"transformers_{name}"] = Contestant(transformers_run(model, rows, count, sampled=sampled))
    if options.with_vllm:
        other = stack.enter_context(vllm_engine(weights, trainer.hf_config, options.prompt_tokens + count))
        for name, temperature in (("sampled", 1.0), ("greedy", 0.0)):
            how = SamplingParameters(max_new_tokens=count, temperature=temperature)
            contestants[f"vllm_{name}"] = Contestant(vllm_run(other, prompts, how))
    return contestants


@contextmanager
def vllm_engine(weights: Mapping[str, Tensor], hf_config: Qwen3MoeConfig, longest: int) -> Iterator[GenerationEngine]:
    """An engine of vLLM with the weights, as a training run starts it."""
    overrides = [
        f"policy.max_total_sequence_length={longest}",
        f"policy.generation.max_new_tokens={longest - 1}",
        "cluster.cpu_workers_per_node=1",
        "policy.train_micro_batch_size=1",
    ]
    config = load_grpo_config(CONFIGS / "grpo_tiny_moe_vllm.yaml", overrides, check_paths=False)
    config.policy.generation.engine.check_installation(config)
    trainer: Any = SentWeights(weights, {"config.json": hf_config.to_json_string().encode()})
    cluster = RayCluster(config.cluster)
    try:
        source = ModelSource(None, None)  # all that the engine needs comes from the trainer
        engine = make_engine(EngineSetup(config, cluster, source, hf_config, None, trainer, print))
        try:
            refit(engine, trainer)
            yield engine
        finally:
            engine.shutdown()
    finally:
        cluster.shutdown()


@dataclass(frozen=True)
class SentWeights:
    """The trainer as an engine with a copy of the weights sees it.

    Attributes:
        weights: By their Hugging Face names.
        model_files: The model's folder without them.
    """

    weights: Mapping[str, Tensor]
    model_files: Mapping[str, bytes]
    weight_version: int = 0

    def weight_transport(self, *, altered: bool = False, then: Callable[[], object] = lambda: None) -> FolderTransport:
        """Return a transfer of them, with nobody to ask for more."""
        return FolderTransport(folder_of_one_machine(1), 1, lambda spec: spec.send(self.weights.items(), 0, 0))


def vllm_run(engine: GenerationEngine, prompts: np.ndarray, how: SamplingParameters) -> Run:
    """Generate as a training run does."""
    requests = [GenerationRequest(tuple(prompt), seed, how) for seed, prompt in enumerate(prompts.tolist())]

    def run() -> Tensor:
        sequences = dict(generate_all(engine, requests))
        return torch.from_numpy(np.stack([sequences[index].token_ids for index in range(len(requests))]))

    return run


def engine_run(engine: MegatronGenerator, prompts: np.ndarray, how: SamplingParameters) -> Run:
    """Generate as a training run does."""
    request = GenerationBatch(
        prompts=tuple(tuple(prompt) for prompt in prompts.tolist()),
        seeds=tuple(range(len(prompts))),
        sampling=how,
    )

    def run() -> Tensor:
        sequences = engine.generate(request, weight_version=0)
        return torch.from_numpy(np.stack([sequence.token_ids for sequence in sequences]))

    return run


def transformers_model(weights: Mapping[str, Tensor], config: Qwen3MoeConfig) -> Qwen3MoeForCausalLM:
    """Load the model into transformers, through a folder as its loader wants it."""
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory(prefix="generation_throughput_") as folder:
        config.save_pretrained(folder)
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, Path(folder) / "model.safetensors")
        return Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def transformers_run(model: Qwen3MoeForCausalLM, prompts: Tensor, count: int, *, sampled: bool) -> Run:
    """Return the transformers' own loop. Nothing ends a response early, as nowhere here."""
    settings: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sampled else {}
    mask = torch.ones_like(prompts)

    def run() -> Tensor:
        made: Tensor = model.generate(
            input_ids=prompts,
            attention_mask=mask,
            do_sample=sampled,
            max_new_tokens=count,
            min_new_tokens=count,
            pad_token_id=0,
            **settings,
        )
        return made[:, prompts.shape[1] :]

    return run


def race(contestants: Mapping[str, Contestant], rounds: int) -> None:
    """Let all run in turns; who begins changes with each round."""
    for number in range(rounds):
        order = list(contestants.values())
        for contestant in order if number % 2 else reversed(order):
            begin = time.perf_counter()
            contestant.run()
            contestant.seconds.append(time.perf_counter() - begin)


def speeds(contestant: Contestant, tokens: int) -> dict[str, float]:
    """Return the new tokens a second."""
    median, best = statistics.median(contestant.seconds), min(contestant.seconds)
    return {"median": round(tokens / median, 1), "best": round(tokens / best, 1)}


def ratios(contestants: Mapping[str, Contestant], other: str) -> dict[str, float]:
    """Return the engine's speed divided by another's: medians over the rounds."""
    return {
        name: round(
            statistics.median(
                theirs / ours
                for theirs, ours in zip(
                    contestants[f"{other}_{name}"].seconds, contestants[f"engine_{name}"].seconds, strict=True
                )
            ),
            4,
        )
        for name in ("sampled", "greedy")
    }


if __name__ == "__main__":
    main()
