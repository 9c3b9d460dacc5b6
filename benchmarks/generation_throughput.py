# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokens a second of generation by the training workers' engine on one CPU core. Prints one JSON line.

The engine runs on a small Qwen3-MoE (4 layers, 8 experts, top 2) in turns with the same model written in plain PyTorch
with a key-value cache, all in one process, so that whatever else the machine does slows both. Both draw tokens and
compute their log-probabilities with the same function.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from nemo_rl_moe.config.loading import load_config
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.generation.interface import GenerationRequest, SamplingParameters
from nemo_rl_moe.loggers.run_folder import collect_versions
from nemo_rl_moe.models.megatron.generation import MegatronGenerator
from nemo_rl_moe.models.megatron.generation.sampling import sample
from nemo_rl_moe.models.megatron.parallel_state import destroy_parallel_state, initialize_parallel_state
from nemo_rl_moe.models.megatron.trainer import MegatronTrainer

REPOSITORY = Path(__file__).resolve().parents[1]
VOCABULARY = 512
MODEL: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "intermediate_size": 256,
    "vocab_size": VOCABULARY,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
EXAMPLES = """\
examples:
  python benchmarks/generation_throughput.py
  python benchmarks/generation_throughput.py --with-transformers     transformers' generate as well
  python benchmarks/generation_throughput.py --layer-spec local      Megatron-Core's own modules, for comparison
  taskset -c 0 python benchmarks/generation_throughput.py            on one core

On a busy machine tokens a second say little: compare ratios, which are of runs next to each other."""

Run = Callable[[], Tensor]


@dataclass
class Contestant:
    """One way to generate, and the seconds of its rounds."""

    run: Run
    seconds: list[float] = field(default_factory=list)


class PlainModel:
    """Qwen3-MoE in plain PyTorch, from Hugging Face weights, with a key-value cache.

    Args:
        weights: By Hugging Face names.
        config: The model's sizes.
        num_slots: Most tokens of a sequence.
    """

    def __init__(self, weights: Mapping[str, Tensor], config: Qwen3MoeConfig, num_slots: int):
        self.config, self.num_slots = config, num_slots
        self.embedding, self.norm = weights["model.embed_tokens.weight"], weights["model.norm.weight"]
        self.head = weights["lm_head.weight"]
        self.layers = [_plain_layer(weights, f"model.layers.{i}.", config) for i in range(config.num_hidden_layers)]
        dim = config.head_dim
        base = float(config.rope_parameters["rope_theta"])
        frequencies = base ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        angles = torch.outer(torch.arange(num_slots).float(), frequencies).repeat(1, 2)
        self.cosines, self.sines = angles.cos(), angles.sin()

    @torch.inference_mode()
    def generate(self, prompts: Tensor, how: SamplingParameters) -> Tensor:
        """Continues prompts `[rows, columns]` of one length."""
        rows = len(prompts)
        shape = (rows, self.config.num_key_value_heads, self.num_slots, self.config.head_dim)
        cache = [(torch.empty(shape), torch.empty(shape)) for _ in self.layers]
        uniforms = torch.rand(how.max_new_tokens, rows, dtype=torch.float64)
        inputs, made, first = prompts, [], 0
        for step in range(how.max_new_tokens):
            logits = self._forward(inputs, cache, first)
            first += inputs.shape[1]
            made.append(sample(logits, uniforms[step], how))
            inputs = made[-1].token_ids[:, None]
        return torch.stack([tokens.token_ids for tokens in made], 1)

    def _forward(self, token_ids: Tensor, cache: Sequence[tuple[Tensor, Tensor]], first: int) -> Tensor:
        """Logits of the last column."""
        rows, columns = token_ids.shape
        config, dim, last = self.config, self.config.head_dim, first + columns
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        hidden = F.embedding(token_ids, self.embedding)
        cosines, sines = self.cosines[first:last], self.sines[first:last]
        for layer, (keys, values) in zip(self.layers, cache, strict=True):
            mixed = F.linear(self._norm(hidden, layer["input_norm"]), layer["qkv"])
            mixed = mixed.view(rows, columns, heads + 2 * groups, dim).transpose(1, 2)
            query, key, value = mixed.split([heads, groups, groups], 1)
            query = _rotate(self._norm(query, layer["query_norm"]), cosines, sines)
            keys[:, :, first:last] = _rotate(self._norm(key, layer["key_norm"]), cosines, sines)
            values[:, :, first:last] = value
            attended = F.scaled_dot_product_attention(
                query, keys[:, :, :last], values[:, :, :last], is_causal=columns > 1, enable_gqa=True
            )
            hidden = hidden + F.linear(attended.transpose(1, 2).reshape(rows, columns, -1), layer["output"])
            hidden = hidden + self._experts(self._norm(hidden, layer["expert_norm"]), layer)
        return F.linear(self._norm(hidden[:, -1], self.norm), self.head)

    def _norm(self, inputs: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(inputs, weight.shape, weight, self.config.rms_norm_eps)

    def _experts(self, inputs: Tensor, layer: Mapping[str, Tensor]) -> Tensor:
        tokens = inputs.reshape(-1, inputs.shape[-1])
        top_k = self.config.num_experts_per_tok
        scores, chosen = F.linear(tokens, layer["router"]).topk(top_k, -1)
        experts, order = chosen.reshape(-1).sort()
        source = order // top_k
        rows = tokens[source]
        ends = torch.bincount(experts, minlength=self.config.num_experts).cumsum(0).to(torch.int32)
        gate, up = F.grouped_mm(rows, layer["gate_up"].transpose(1, 2), offs=ends).chunk(2, -1)
        made = F.grouped_mm(F.silu(gate) * up, layer["down"].transpose(1, 2), offs=ends)
        made = made * scores.softmax(-1).reshape(-1)[order, None]
        return torch.zeros_like(tokens).index_add_(0, source, made).view_as(inputs)


def _rotate(inputs: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    left, right = inputs.chunk(2, -1)
    return inputs * cosines + torch.cat([-right, left], -1) * sines


def _plain_layer(weights: Mapping[str, Tensor], prefix: str, config: Qwen3MoeConfig) -> dict[str, Tensor]:
    attention = {name: weights[f"{prefix}self_attn.{name}.weight"] for name in ("q_proj", "k_proj", "v_proj")}
    experts = [f"{prefix}mlp.experts.{index}." for index in range(config.num_experts)]

    def stacked(*names: str) -> Tensor:
        return torch.stack([torch.cat([weights[f"{expert}{name}.weight"] for name in names]) for expert in experts])

    return {
        "input_norm": weights[f"{prefix}input_layernorm.weight"],
        "qkv": torch.cat(list(attention.values())),
        "query_norm": weights[f"{prefix}self_attn.q_norm.weight"],
        "key_norm": weights[f"{prefix}self_attn.k_norm.weight"],
        "output": weights[f"{prefix}self_attn.o_proj.weight"],
        "expert_norm": weights[f"{prefix}post_attention_layernorm.weight"],
        "router": weights[f"{prefix}mlp.gate.weight"],
        "gate_up": stacked("gate_proj", "up_proj"),
        "down": stacked("down_proj"),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line, runs, and prints the result."""
    options = parse_arguments(arguments)
    torch.set_num_threads(1)
    with one_rank(make_policy(options.layer_spec)) as policy:
        trainer = MegatronTrainer(policy, Qwen3MoeConfig(**MODEL), None, num_steps=1)
        contestants = make_contestants(trainer, options)
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
        "same_greedy_tokens_as_plain": agreement,
        "prompts": options.prompts,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "rounds": options.rounds,
        "threads": torch.get_num_threads(),
        "layer_spec": options.layer_spec,
        "model": MODEL | {"precision": "float32"},
        "load_average": round(os.getloadavg()[0], 2),
        "versions": collect_versions(),
    }
    print(json.dumps(result))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def positive(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"got {text}, expected a whole number, 1 or more")
        return int(text)

    parser.add_argument("--rounds", type=positive, default=10, metavar="N", help="measured rounds (default: 10)")
    parser.add_argument("--prompts", type=positive, default=32, metavar="N", help="sequences at a time (default: 32)")
    parser.add_argument("--prompt-tokens", type=positive, default=32, metavar="N", help="of each (default: 32)")
    parser.add_argument("--new-tokens", type=positive, default=64, metavar="N", help="of each (default: 64)")
    parser.add_argument("--with-transformers", action="store_true", help="run transformers' generate as well")
    parser.add_argument(
        "--layer-spec",
        choices=("auto", "local"),
        default="auto",
        help="auto: the fastest modules there are; local: Megatron-Core's own (default: auto)",
    )
    return parser.parse_args(arguments)


def make_policy(layer_spec: str) -> PolicyConfig:
    """The demo's policy with this benchmark's model."""
    overrides = [
        f"policy.megatron_cfg.layer_spec={layer_spec}",
        "policy.max_total_sequence_length=4096",
        "policy.init_seed=1",
    ]
    path = REPOSITORY / "examples" / "configs" / "sft_tiny_moe.yaml"
    return load_config(path, overrides, check_paths=False).policy


@contextmanager
def one_rank(policy: PolicyConfig) -> Iterator[PolicyConfig]:
    """A job of this process alone, on whatever port is free."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    initialize_parallel_state(policy.megatron_cfg, 0, 1, 0, seed=0)
    try:
        yield policy
    finally:
        destroy_parallel_state()


def make_contestants(trainer: MegatronTrainer, options: argparse.Namespace) -> dict[str, Contestant]:
    """The engine and the others, sampling at temperature 1 and greedy, all with the same weights."""
    prompts = np.random.default_rng(0).integers(VOCABULARY, size=(options.prompts, options.prompt_tokens))
    rows, count = torch.from_numpy(prompts), options.new_tokens
    weights = trainer.export_weights()
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
    return contestants


def engine_run(engine: MegatronGenerator, prompts: np.ndarray, how: SamplingParameters) -> Run:
    """Generates as a training run does."""
    request = GenerationRequest(
        prompts=tuple(tuple(prompt) for prompt in prompts.tolist()),
        seeds=tuple(range(len(prompts))),
        sampling=how,
    )

    def run() -> Tensor:
        sequences = engine.generate(request, weight_version=0)
        return torch.from_numpy(np.stack([sequence.token_ids for sequence in sequences]))

    return run


def transformers_model(weights: Mapping[str, Tensor], config: Qwen3MoeConfig) -> Qwen3MoeForCausalLM:
    """The same model in transformers, through a folder as its loader wants it."""
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory(prefix="generation_throughput_") as folder:
        config.save_pretrained(folder)
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, Path(folder) / "model.safetensors")
        return Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def transformers_run(model: Qwen3MoeForCausalLM, prompts: Tensor, count: int, *, sampled: bool) -> Run:
    """Transformers' own loop. Nothing ends a response early, as nowhere here."""
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
    """Lets all run in turns; who begins changes with each round."""
    for number in range(rounds):
        order = list(contestants.values())
        for contestant in order if number % 2 else reversed(order):
            begin = time.perf_counter()
            contestant.run()
            contestant.seconds.append(time.perf_counter() - begin)


def speeds(contestant: Contestant, tokens: int) -> dict[str, float]:
    """New tokens a second."""
    median, best = statistics.median(contestant.seconds), min(contestant.seconds)
    return {"median": round(tokens / median, 1), "best": round(tokens / best, 1)}


def ratios(contestants: Mapping[str, Contestant], other: str) -> dict[str, float]:
    """The engine's speed divided by another's: medians over the rounds."""
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
