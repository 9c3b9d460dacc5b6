# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Mismatch of engine and trainer with merged weights, and with adapters that the engine applies to the base.

An engine samples responses, and the trainer computes the log-probabilities and routed experts of the same tokens. The
random factors of each adapter are scaled, so that the update `scale * B A` has a given norm relative to its weight. A
merged update is added in float32 and rounded to the engine's format once. `lost` is the norm of this rounding error
relative to the update's norm, over all weights with adapters. `gap` is the mean absolute difference of the
log-probabilities of sampled tokens in nats, with its standard error over sequences. `rows` is the share of rows (one
token in one layer) whose experts differ. Prints a table.
"""

import asyncio
import math
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from jaxtyping import Float
from small_model import CONFIGS, VOCABULARY, make_parser, one_rank, overrides_of, positive
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.config.schema_run import GENERATION_ROLE
from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.distributed.node_tools import SHARED_MEMORY
from nemo_rl_moe.distributed.shared_gpu import OwnGpu, SharedGpu
from nemo_rl_moe.distributed.stored_rows import StoredRows
from nemo_rl_moe.generation.interface import (
    GeneratedSequence,
    GenerationBatch,
    GenerationEngine,
    GenerationRequest,
    SamplingParameters,
)
from nemo_rl_moe.generation.refit import refit
from nemo_rl_moe.generation.registry import EngineSetup, make_engine
from nemo_rl_moe.models.hf_files import find_model, load_hf_config, plain_config
from nemo_rl_moe.models.megatron.lora.adapter import Adapter, Pair, adapters_in
from nemo_rl_moe.models.megatron.lora.transfer import load_factors
from nemo_rl_moe.models.megatron.training.megatron_model import MegatronModel
from nemo_rl_moe.models.megatron.weights.hf_receive import load_tensors
from nemo_rl_moe.models.policy.separate_engine import on_one_rank
from nemo_rl_moe.weight_sync.transport import TransportSpec, WeightTransport

SEPARATE, VLLM = "megatron_separate", "vllm"
REFITS = ("merged", "adapter")
TEXTS = (
    "The capital of France is",
    "Once upon a time there was a small",
    "To make bread you need flour, water and",
    "The three primary colors are",
    "In the year 1969 humans first",
    "A list of animals that live in the sea:",
    "My favorite season of the year is",
    "The largest planet of the solar system is",
)
NEW_TOKENS, AT_A_TIME = 32, 16
TINY_HYBRID: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000.0,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    },
}
"""A Qwen3.5-MoE with random weights."""


@dataclass(frozen=True)
class Measured:
    """Differences between trainer and engine for the sampled tokens of each sequence.

    Attributes:
        gaps: Absolute differences of log-probabilities, nats.
        other_rows: Whether the sets of experts differ, for each token and layer.
    """

    gaps: Sequence[Float[np.ndarray, " tokens"]]
    other_rows: Sequence[np.ndarray]

    @property
    def gap(self) -> str:
        """Mean of the sequences' mean differences, and its standard error."""
        means = np.array([each.mean() for each in self.gaps])
        return f"{means.mean():.1e} ± {means.std(ddof=1) / math.sqrt(len(means)):.1e}"

    @property
    def rows(self) -> str:
        """Share of rows with other experts."""
        return f"{np.concatenate([each.ravel() for each in self.other_rows]).mean():.4f}"


def config_of(folder: Path, engine: str, precision: str, refit_by: str, experts: str) -> GRPOMasterConfig:
    """Return a run's configuration. vLLM applies no adapters to experts, so these have none."""
    values: dict[str, object] = {
        "policy.model_name": folder,
        "policy.precision": precision,
        "policy.max_total_sequence_length": 128,
        "policy.megatron_cfg.capture_routing": "true",
        "policy.lora": "{rank: 16, alpha: 32.0, use_rslora: false, targets: [all-linear], dropout: 0.0,"
        f" experts: {'none' if engine == VLLM else experts}, init: kaiming, path: null}}",
        "policy.generation.backend": engine,
        "policy.generation.lora_refit": refit_by,
        "policy.generation.stop_token_ids": "[]",
        "cluster.cpu_workers_per_node": 1,
    }
    if engine == SEPARATE:
        values[f"+cluster.roles.{GENERATION_ROLE}"] = "{cpu_workers_per_node: 1}"
    return load_grpo_config(CONFIGS / "grpo_tiny_moe.yaml", overrides_of(values), check_paths=False)


def pairs_of(adapter: Adapter) -> list[Pair]:
    return [pair for pair in adapter.pairs.values() if isinstance(pair, Pair)]


def weights_of(adapter: Adapter) -> Iterator[tuple[Tensor, Callable[[float], object], Tensor]]:
    """Yield each weight of an adapter, a function that multiplies its update by a factor, and the update."""
    pairs = pairs_of(adapter)
    weights = [each for weight in adapter.base.weights for each in (weight if weight.dim() == 3 else [weight])]
    for index, weight in enumerate(weights):

        def multiply(factor: float, index: int = index) -> None:
            for pair in pairs:
                ups = pair.lora_B.data
                (ups[index] if adapter.is_per_expert else ups).mul_(factor)

        yield weight.detach().float(), multiply, adapter.delta(index)


@torch.no_grad()
def set_update(model: MegatronModel, norm: float, precision: str) -> float:
    """Give all adapters updates of a relative norm, and return the share of the updates that merging loses."""
    dtype: torch.dtype = getattr(torch, precision)
    lost = total = 0.0
    for number, adapter in enumerate(adapters_in(model.chunks)):
        generator = torch.Generator().manual_seed(number)
        for pair in pairs_of(adapter):
            pair.lora_B.data.copy_(torch.randn(pair.lora_B.shape, generator=generator))
        for weight, multiply, update in weights_of(adapter):
            multiply(norm * float(weight.norm() / update.norm()))
        for weight, _, update in weights_of(adapter):
            error = (weight + update).to(dtype).double() - weight.double() - update.double()
            lost += float(error.square().sum())
            total += float(update.double().square().sum())
    return math.sqrt(lost / total) if total else 0.0


@dataclass
class Sender:
    """The trainer's model as a policy that sends its weights to an engine from this process."""

    model: MegatronModel
    model_files: Mapping[str, bytes]
    weight_version: int = 0
    gpu: SharedGpu = field(default_factory=OwnGpu)

    def weight_transport(
        self, *, altered: bool = False, whole: bool = False, then: Callable[[], object] = lambda: None
    ) -> WeightTransport:
        """Return a transport of all weights."""

        def send(spec: TransportSpec) -> int:
            with ThreadPoolExecutor(1) as pool:
                sending = pool.submit(self.model.send_weights, spec)
                then()
                return sending.result()

        return WeightTransport(SHARED_MEMORY, 1, send)

    def generate(self, batch: GenerationBatch) -> Sequence[GeneratedSequence]:
        """Raise an error, because the engine generates."""
        raise NotImplementedError


def fetched(rows: StoredRows | None) -> np.ndarray:
    assert rows is not None  # the configuration asks for a capture
    (piece,) = rows.pieces
    source = ray.get(piece.source) if isinstance(piece.source, ray.ObjectRef) else piece.source
    return np.asarray(source[piece.first : piece.first + piece.num_rows])


def compare(trainer: MegatronModel, prompts: Sequence[tuple[int, ...]], found: Sequence[GeneratedSequence]) -> Measured:
    """Return the differences of sampled tokens' log-probabilities, and of the experts of all tokens but the last."""
    wholes = [[*prompt, *each.token_ids.tolist()] for prompt, each in zip(prompts, found, strict=True)]
    gaps, other_rows = [], []
    for begin in range(0, len(wholes), AT_A_TIME):
        part = wholes[begin : begin + AT_A_TIME]
        lengths = torch.tensor([len(whole) for whole in part])
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(whole) for whole in part], batch_first=True)
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        batch = TokenBatch(ids, lengths, mask, tuple(map(str, range(len(part)))))
        (logprobs,), routes = trainer.logprobs_and_routes([batch])
        for row, whole in enumerate(part):
            sequence = found[begin + row]
            own = logprobs[row, len(whole) - len(sequence.token_ids) : len(whole)].numpy()
            gaps.append(np.abs(own.astype(np.float64) - sequence.logprobs))
            theirs = np.sort(fetched(sequence.routed_experts)[: len(whole) - 1], -1)
            ours = np.sort(fetched(routes[row])[: len(whole) - 1], -1)
            other_rows.append((theirs != ours).any(-1))
    return Measured(gaps, other_rows)


@contextmanager
def separate_engine(
    config: GRPOMasterConfig, folder: Path, trainer: MegatronModel
) -> Iterator[Callable[[Sequence[GenerationRequest]], Sequence[GeneratedSequence]]]:
    """Run a copy of the model as the engine megatron_separate does, in this process."""
    policy = on_one_rank(config.policy)
    copy = MegatronModel(policy, trainer.hf_config, folder)

    def answer(requests: Sequence[GenerationRequest]) -> Sequence[GeneratedSequence]:
        sent = trainer._sent_tensors(on_device=False)
        if copy.adapters is None:
            load_tensors(copy.chunks, copy.config, copy.hf_config, sent)
        else:
            load_factors(copy.chunks, sent)
        return copy.generate(GenerationBatch.of(requests), None)

    yield answer


@contextmanager
def vllm_engine(
    config: GRPOMasterConfig, folder: Path, trainer: MegatronModel
) -> Iterator[Callable[[Sequence[GenerationRequest]], Sequence[GeneratedSequence]]]:
    """Run an engine of vLLM, with a Ray of its own."""
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".json", ".jinja")}
    sender = Sender(trainer, files)
    cluster = RayCluster(config.cluster)
    engine: GenerationEngine | None = None
    try:
        source, hf_config = find_model(config.policy), load_hf_config(str(folder))
        warn = lambda line: print(line, file=sys.stderr)  # noqa: E731
        engine = made = make_engine(EngineSetup(config, cluster, source, hf_config, None, sender, warn))

        def answer(requests: Sequence[GenerationRequest]) -> Sequence[GeneratedSequence]:
            refit(made, sender)

            async def all_of_them() -> list[GeneratedSequence]:
                return list(await asyncio.gather(*map(made.generate, requests)))

            return asyncio.run(all_of_them())

        yield answer
    finally:
        if engine is not None:
            engine.shutdown()
        cluster.shutdown()


def make_hybrid(folder: Path) -> None:
    """Write a tiny Qwen3.5-MoE, with numbers of bfloat16."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_5_moe_text", **TINY_HYBRID)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def make_prompts(folder: Path, num_samples: int) -> list[tuple[int, ...]]:
    """Return texts of a model with a tokenizer, else random tokens, each once for each sample."""
    if (folder / "tokenizer.json").is_file():
        prompts = [tuple(ids) for ids in AutoTokenizer.from_pretrained(folder)(list(TEXTS))["input_ids"]]
    else:
        draws = np.random.default_rng(0).integers(VOCABULARY, size=(len(TEXTS), 8))
        prompts = [tuple(map(int, row)) for row in draws]
    return [prompt for prompt in prompts for _ in range(num_samples)]


def run(folder: Path, engine: str, precision: str, options: Namespace) -> None:
    """Print the rows of one engine and number format."""
    prompts = make_prompts(folder, options.samples)
    sampling = SamplingParameters(max_new_tokens=NEW_TOKENS)
    requests = [GenerationRequest(prompt, seed, sampling) for seed, prompt in enumerate(prompts)]
    hf_config = plain_config(load_hf_config(str(folder)))
    start = vllm_engine if engine == VLLM else separate_engine
    lost: dict[float, float] = {}
    found: dict[tuple[str, float], Measured] = {}
    for refit_by in REFITS:
        config = config_of(folder, engine, precision, refit_by, options.experts)
        with one_rank(config.policy):
            trainer = MegatronModel(config.policy, hf_config, folder)
            with start(config, folder, trainer) as answer:
                for norm in options.norms:
                    lost[norm] = set_update(trainer, norm, precision)
                    found[refit_by, norm] = compare(trainer, prompts, answer(requests))
    for norm in options.norms:
        both = [found[refit_by, norm] for refit_by in REFITS]
        cells = [
            engine,
            precision,
            f"{norm:g}",
            f"{lost[norm]:.3f}",
            *(of.gap for of in both),
            *(of.rows for of in both),
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of one model."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", type=Path, help="folder of a model; default: a tiny Qwen3.5-MoE with random weights")
    parser.add_argument("--engines", nargs="+", default=[SEPARATE, VLLM], choices=(SEPARATE, VLLM))
    parser.add_argument("--formats", nargs="+", default=["float32", "bfloat16"], choices=("float32", "bfloat16"))
    parser.add_argument("--norms", nargs="+", type=float, default=[0.0, 1e-4, 1e-3, 1e-2])
    parser.add_argument(
        "--experts",
        default="per_expert",
        choices=("per_expert", "none"),
        help="of megatron_separate's adapters",
    )
    parser.add_argument("--samples", type=positive, default=8, help="responses to each of 8 prompts (default: 8)")
    parser.add_argument("--threads", type=positive, default=1, help="of this process (default: 1)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    print("| engine | format | norm | lost | gap: merged | gap: adapter | rows: merged | rows: adapter |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as parent:
        folder = options.model or Path(parent, "model")
        if options.model is None:
            make_hybrid(folder)
        for engine in options.engines:
            for precision in options.formats:
                if engine == VLLM and precision == "float32":
                    continue  # vLLM computes gated delta nets on CPUs in bfloat16 alone
                run(folder, engine, precision, options)


if __name__ == "__main__":
    main()
