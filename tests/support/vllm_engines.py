# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines beside a model of transformers that stands for the trainer, and refits between them."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3MoeConfig

from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.distributed.node_tools import SHARED_MEMORY
from nemo_rl_moe.generation.diagnosis import disagreement
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationRequest, SamplingParameters
from nemo_rl_moe.generation.refit import refit
from nemo_rl_moe.generation.refit_check import RefitCheck, probe_sequences
from nemo_rl_moe.generation.vllm.engine import VllmEngine
from nemo_rl_moe.generation.vllm.placement import Placement
from nemo_rl_moe.generation.vllm.releases import installed_release
from nemo_rl_moe.generation.vllm.worker import VllmSettings, VllmWorker
from nemo_rl_moe.rollouts.dispatch.gate import EngineGate
from nemo_rl_moe.rollouts.loops import LoopThread
from nemo_rl_moe.weight_sync.fingerprints import fingerprints_of
from nemo_rl_moe.weight_sync.transport import TransportSpec, WeightTransport
from tests.support.scripted_rollouts import generate_all

VOCABULARY_SIZE = 64
PROMPT = (3, 4, 5, 6)
FREE = SamplingParameters(max_new_tokens=16)
Change = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]


def vllm_tests(timeout_s: int = 600) -> list[pytest.MarkDecorator]:
    """Return the marks of a file whose tests start engines of vLLM."""
    is_missing = installed_release() is None
    skip = pytest.mark.skipif(is_missing, reason="vLLM is not installed: make vllm")
    return [pytest.mark.vllm, pytest.mark.timeout(timeout_s), skip]


def as_they_are(tensors: dict[str, Tensor]) -> Mapping[str, Tensor]:
    return tensors


@dataclass(frozen=True)
class SentWeights:
    """Tensors as a policy sends them, from a sender in a thread, in buckets of some tensors each."""

    tensors: Mapping[str, Tensor]
    weight_version: int

    def weight_transport(
        self, *, altered: bool = False, whole: bool = False, then: Callable[[], object] = lambda: None
    ) -> WeightTransport:
        tensors = dict(self.tensors)
        if altered:
            tensors = {name: 1.5 * tensor.roll(1, -1) for name, tensor in tensors.items()}

        def send(spec: TransportSpec) -> int:
            with ThreadPoolExecutor(1) as pool:
                sending = pool.submit(spec.send, iter(tensors.items()), 0, self.weight_version)
                then()
                return sending.result()

        return WeightTransport(SHARED_MEMORY, 1, send, bucket_bytes=20_000, stall_timeout_s=30.0)


class EngineTrainer(Protocol):
    """Whatever has a model and sends its weights."""

    @property
    def model_files(self) -> dict[str, bytes]: ...

    def refit(self, engine: VllmEngine) -> None: ...


class Trainer:
    """Weights that move, their scores, and their way into engines.

    Args:
        folder: Gets a tiny Qwen3-MoE with random weights, large enough for its experts to matter.
        expert_size: Width of an expert; vLLM pads one that is no multiple of 32.
        config: Of a model in its place.
        scale: Factor of all matrices.
        is_tied: The output layer has the embedding's weights.
    """

    def __init__(
        self, folder: Path, expert_size: int = 24, config: Any = None, scale: float = 6.0, *, is_tied: bool = False
    ):
        self.folder = folder
        config = config or Qwen3MoeConfig(
            vocab_size=VOCABULARY_SIZE,
            hidden_size=32,
            intermediate_size=48,
            moe_intermediate_size=expert_size,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            num_experts=8,
            num_experts_per_tok=2,
            max_position_embeddings=512,
            norm_topk_prob=True,
            tie_word_embeddings=is_tied,
        )
        torch.manual_seed(5)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        self.tensors: dict[str, Tensor] = {}
        for name, tensor in load_file(folder / "model.safetensors").items():
            self.tensors[name] = tensor if tensor.dim() == 1 else scale * tensor
        self.version = 0
        self._save()

    @property
    def model_files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.folder.iterdir() if path.suffix == ".json"}

    def move(self) -> None:
        """An update: every tensor changes a little."""
        generator = torch.Generator().manual_seed(self.version)
        for name, tensor in self.tensors.items():
            self.tensors[name] = tensor * (1 + 0.05 * torch.randn(tensor.shape, generator=generator))
        self.version += 1
        self._save()

    def scores(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[Any]:
        ids = torch.tensor(sequences)
        with torch.no_grad():
            logprobs = (self._model(ids).logits / temperature).log_softmax(-1)
        found = logprobs[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
        return [row.numpy().astype(np.float64) for row in found]

    def routes(self, sequence: Sequence[int]) -> Any:
        """Return the experts of each token in each layer, `[tokens, layers, topk]`; of softmax routers."""
        with torch.no_grad():
            logits = self._model(torch.tensor([sequence]), output_router_logits=True).router_logits
        return torch.stack(logits, dim=1).topk(self._model.config.num_experts_per_tok).indices.numpy()

    def start_scores(self, sequences: Sequence[Sequence[int]]) -> Callable[[], list[Any]]:
        """Compute `scores` at once."""
        found = self.scores(sequences)
        return lambda: found

    def start_fingerprints(self, number_format: str) -> Callable[[], dict[str, str]]:
        """Return what gives the fingerprints of the weights as they are."""
        found = fingerprints_of(self.tensors.items(), number_format)
        return lambda: found

    def refit(self, engine: VllmEngine, change: Change = as_they_are, *, altered: bool = False) -> None:
        refit(engine, SentWeights(change(dict(self.tensors)), self.version), altered=altered)

    def save_to(self, folder: Path) -> None:
        self._model.save_pretrained(folder)

    def _save(self) -> None:
        save_file(self.tensors, self.folder / "model.safetensors", metadata={"format": "pt"})
        self._model: Any = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()


def start_engine(cluster: RayCluster, trainer: EngineTrainer, **changes: Any) -> VllmEngine:
    """Return the engines of one core each, without weights of the trainer yet.

    Args:
        cluster: A started Ray.
        trainer: Gives the model, and weights where all engines have died.
        changes: `num_engines`, `stall_timeout_s`, `warn`, and fields of `VllmSettings`.
    """
    settings: dict[str, Any] = {
        "model_files": trainer.model_files,
        "decodes_text": False,
        "dtype": "float32",
        "max_tokens": 96,
        "max_sequences": None,
        "seed": 0,
        "on_gpus": False,
        "tensor_parallel_size": 1,
        "expert_parallel": False,
        "gpu_memory_utilization": 0.5,
        "cpu_cache_gib": 1,
        "num_threads": 1,
    }
    further: dict[str, Any] = {"num_engines": 1, "stall_timeout_s": 60.0, "warn": print, "start_timeout_s": 300.0}
    of_engine = {field.name for field in fields(VllmSettings)}
    for name, value in changes.items():
        (settings if name in of_engine else further)[name] = value
    return VllmEngine(VllmSettings(**settings), placement=Placement(cluster, 0), refit=trainer.refit, **further)


def requests(count: int, sampling: SamplingParameters = FREE) -> list[GenerationRequest]:
    """Return the requests with seeds of their own, larger than a signed number of 64 bits."""
    return [GenerationRequest((*PROMPT, 7 + index % 5), 2**63 + index, sampling) for index in range(count)]


def generated(engine: VllmEngine, asked: list[GenerationRequest]) -> list[GeneratedSequence]:
    found = list(generate_all(engine, asked))
    assert sorted(index for index, _ in found) == list(range(len(asked))), "each once"
    return [sequence for _, sequence in sorted(found, key=lambda pair: pair[0])]


def generated_across_an_update(
    engine: VllmEngine, trainer: Trainer, asked: list[GenerationRequest], num_steps: int
) -> list[GeneratedSequence]:
    """Return the answers to requests that have run for so many steps when new weights come."""
    thread, gate = LoopThread(), EngineGate(engine)
    tasks: list[asyncio.Task[GeneratedSequence]] = []

    async def begin() -> None:
        tasks.extend(asyncio.create_task(gate.generate(request)) for request in asked)

    async def opened() -> list[GeneratedSequence]:
        gate.open()
        return list(await asyncio.gather(*tasks))

    try:
        num_before = engine.num_steps()
        thread.run(begin())
        while engine.num_steps() < num_before + num_steps:
            time.sleep(0.001)
        thread.run(gate.close())
        trainer.move()
        trainer.refit(engine)
        return thread.run(opened())
    finally:
        thread.close()


def check_of(engine: VllmEngine, trainer: Trainer, **changes: object) -> RefitCheck:
    sequences = probe_sequences(4, 24, VOCABULARY_SIZE)
    check = RefitCheck(
        sequences,
        1.0,
        trainer.start_scores,
        lambda altered: trainer.refit(engine, altered=altered),
        lambda copy: disagreement(
            partial(engine.module_outputs, copy), trainer.save_to, sequences, in_float32=True, topk=2
        ),
        in_float32=True,
        bound_nats=None,
        refits_again=False,
    )
    return replace(check, **changes)


def worker_that_keeps_kernels() -> type[VllmWorker]:
    """Return a worker whose kernels stay packed when weights arrive; travels to its process by value."""

    class Forgetful(VllmWorker):
        def start(self) -> str | None:
            from nemo_rl_moe.generation.vllm import releases

            releases.PackedExperts._forget_layer = lambda packed, name: None
            return super().start()

    return Forgetful


def letters_tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer of the model's vocabulary: letters, digits, a blank, and one token of two letters."""
    pieces = [*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789", "\u0120", "ab"]
    assert len(pieces) == VOCABULARY_SIZE
    tokenizer = Tokenizer(BPE({piece: index for index, piece in enumerate(pieces)}, [("a", "b")]))
    tokenizer.decoder = ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
