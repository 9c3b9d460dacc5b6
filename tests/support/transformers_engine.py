# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A generation engine of another package: transformers models in Ray actors, with weights of their own.

A run takes it by `policy.generation.backend: "tests.support.transformers_engine:make_engine"`. It starts from random
weights, so that whatever it says of a trained policy has come through `update_weights`.
"""

import asyncio
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor

from nemo_rl_moe.errors import WeightSyncError
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationEngine, GenerationRequest, SamplingParameters
from nemo_rl_moe.generation.lockstep import LockstepEngine
from nemo_rl_moe.generation.registry import EngineSetup
from nemo_rl_moe.weight_sync.fingerprints import fingerprints_of
from nemo_rl_moe.weight_sync.transport import NamedTensor, TransportSpec, WeightTransport

NUM_WORKERS = 2
EXPERT = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<index>\d+)\.(?P<projection>gate|up|down)_proj\.weight")


def make_engine(setup: EngineSetup) -> "TransformersEngine":
    return TransformersEngine(setup.source.folder())


def make_streaming_engine(setup: EngineSetup) -> "StreamingEngine":
    """Return one that takes requests as they come."""
    return StreamingEngine(setup.source.folder(), num_workers=1)


class TransformersWorker:  # pragma: no cover  (runs in another process)
    """One copy of the model.

    Args:
        model_folder: Holds the model's `config.json`; no weights are read.
    """

    def __init__(self, model_folder: Path):
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.set_num_threads(1)
        config = AutoConfig.from_pretrained(model_folder)
        self._model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self._asleep: Path | None = None
        self._names: list[str] = []

    def receive(self, spec: TransportSpec, receiver: int) -> str | None:
        """Take part in a transfer; what went wrong, or None."""
        try:
            self.wake()
            spec.receive(receiver, self._load)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def generate(
        self, prompts: Tensor, seeds: Sequence[int], sampling: SamplingParameters, version: int
    ) -> list[GeneratedSequence]:
        assert not sampling.stop_strings, "stop strings are not this engine's"
        assert sampling.top_k is None, "nor is top-k"
        assert sampling.top_p == 1, "nor is top-p"
        uniforms = np.stack(
            [np.random.Generator(np.random.Philox(key=seed)).random(sampling.max_new_tokens) for seed in seeds]
        )
        tokens, logprobs = self._sample(prompts, torch.from_numpy(uniforms), sampling)
        found = []
        for row_tokens, row_logprobs in zip(tokens.numpy(), logprobs.numpy(), strict=True):
            ends = np.flatnonzero(np.isin(row_tokens, sampling.stop_token_ids))
            length = ends[0] + 1 if len(ends) else len(row_tokens)
            found.append(GeneratedSequence(row_tokens[:length], row_logprobs[:length], not len(ends), version))
        return found

    @torch.no_grad()
    def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[np.ndarray]:
        ids = torch.tensor(sequences)
        logprobs = (self._model(input_ids=ids).logits / temperature).log_softmax(-1)
        return list(logprobs[:, :-1].gather(-1, ids[:, 1:, None])[..., 0].numpy())

    def weight_fingerprints(self, number_format: str) -> dict[str, str]:
        parameters = dict(self._model.named_parameters())
        return fingerprints_of(((name, place_of(name, parameters)) for name in self._names), number_format)

    def sleep(self) -> None:
        """Leave the memory: the weights wait on the disk."""
        if self._asleep is not None:
            return
        self._asleep = Path(tempfile.mkdtemp(prefix="transformers_engine_"))
        self._model.save_pretrained(self._asleep)
        self._model = None

    def wake(self) -> None:
        from transformers import AutoModelForCausalLM

        if self._asleep is None:
            return
        self._model = AutoModelForCausalLM.from_pretrained(self._asleep, dtype=torch.float32).eval()
        shutil.rmtree(self._asleep)
        self._asleep = None

    @torch.no_grad()
    def _sample(self, prompts: Tensor, uniforms: Tensor, sampling: SamplingParameters) -> tuple[Tensor, Tensor]:
        """Return the tokens and log-probabilities, `[prompts, max_new_tokens]`; also beyond a sequence's end."""
        tokens, logprobs, inputs, cache = [], [], prompts, None
        for step in range(sampling.max_new_tokens):
            output = self._model(input_ids=inputs, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            probs = (output.logits[:, -1].float() / (sampling.temperature or 1.0)).softmax(-1)
            if sampling.temperature == 0:
                chosen = probs.argmax(-1)
            else:
                cumulative = probs.cumsum(-1, dtype=torch.float64)
                target = cumulative[:, -1:] * uniforms[:, step, None]
                chosen = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=probs.shape[-1] - 1)
            tokens.append(chosen)
            logprobs.append(probs.gather(-1, chosen[:, None])[:, 0].log())
            inputs = chosen[:, None]
        return torch.stack(tokens, 1), torch.stack(logprobs, 1)

    def _load(self, tensors: Iterator[NamedTensor]) -> None:
        """Fill every parameter of the model, or raises."""
        parameters = dict(self._model.named_parameters())
        missing = sum(parameter.numel() for parameter in parameters.values())
        self._names = []
        for name, tensor in tensors:
            self._names.append(name)
            target = place_of(name, parameters)
            if target.shape != tensor.shape:
                raise ValueError(f"{name}: got the shape {tuple(tensor.shape)}, expected {tuple(target.shape)}")
            with torch.no_grad():
                target.copy_(tensor)
            missing -= target.numel()
        if missing:
            raise ValueError(f"{missing} of the model's numbers have not arrived")


def place_of(name: str, parameters: Mapping[str, Tensor]) -> Tensor:
    """Return the parameter, or the part of it, that a tensor of a checkpoint fills: transformers stacks experts in
    memory.
    """
    match = EXPERT.fullmatch(name)
    if match is None:
        return parameters[name]
    experts, index = match["experts"], int(match["index"])
    if match["projection"] == "down":
        return parameters[f"{experts}.down_proj"][index]
    gate, up = parameters[f"{experts}.gate_up_proj"][index].chunk(2)
    return gate if match["projection"] == "gate" else up


class TransformersEngine(LockstepEngine):
    """The engine with copies of the model in processes of its own, which pools requests of one length.

    Args:
        model_folder: Holds the model's `config.json`.
        num_workers: Copies.
    """

    shares_weights = False
    can_score = gives_fingerprints = True

    def __init__(self, model_folder: Path, num_workers: int = NUM_WORKERS):
        super().__init__(self._in_groups)
        # The cluster's cores are the trainer's: Ray is to start these beside them.
        worker = ray.remote(TransformersWorker).options(num_cpus=0)
        self._workers = [worker.remote(model_folder.absolute()) for _ in range(num_workers)]
        self._version: int | None = None

    @property
    def workers(self) -> list[Any]:
        return self._workers

    @property
    def version(self) -> int | None:
        """Optimizer steps of the weights; None: there are none yet."""
        return self._version

    def _in_groups(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, GeneratedSequence]]:
        """Yield the continuations as they finish, group by group of those of one length."""
        if self._version is None:
            raise RuntimeError("the engine has got no weights yet")
        groups: defaultdict[tuple[SamplingParameters, int], list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            groups[request.sampling, len(request.token_ids)].append(index)
        calls: dict[Any, list[int]] = {}
        for number, ((sampling, _), indices) in enumerate(groups.items()):
            prompts = torch.tensor([requests[index].token_ids for index in indices])
            seeds = [requests[index].seed for index in indices]
            worker = self._workers[number % len(self._workers)]
            calls[worker.generate.remote(prompts, seeds, sampling, self._version)] = indices
        while calls:
            (ready, *_), _ = ray.wait(list(calls))
            yield from zip(calls.pop(ready), ray.get(ready), strict=True)

    def update_weights(self, transport: WeightTransport, version: int) -> None:
        self._version = None
        spec = transport.open(num_receivers=len(self._workers), version=version)
        calls = [worker.receive.remote(spec, number) for number, worker in enumerate(self._workers)]
        transport.send()
        for problem in ray.get(calls):
            if problem is not None:
                raise WeightSyncError(problem)
        self._version = version

    def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[list[np.ndarray]]:
        return list(ray.get([worker.score.remote(sequences, temperature) for worker in self._workers]))

    def weight_fingerprints(self, number_format: str) -> list[dict[str, str]]:
        return list(ray.get([worker.weight_fingerprints.remote(number_format) for worker in self._workers]))

    def sleep(self) -> None:
        """Drop the models from memory."""
        ray.get([worker.sleep.remote() for worker in self._workers])

    def wake(self) -> None:
        ray.get([worker.wake.remote() for worker in self._workers])

    def shutdown(self) -> None:
        for worker in self._workers:
            ray.kill(worker)


class StreamingEngine(GenerationEngine):
    """The engine that takes requests as they come: each goes to a worker by itself.

    Args:
        model_folder: Holds the model's `config.json`.
        num_workers: Copies.
    """

    can_score = gives_fingerprints = True

    def __init__(self, model_folder: Path, num_workers: int):
        self._pooled = TransformersEngine(model_folder, num_workers)
        self._workers, self._next = self._pooled.workers, 0

    async def generate(self, request: GenerationRequest) -> GeneratedSequence:
        version = self._pooled.version
        assert version is not None, "the engine has got no weights yet"
        worker = self._workers[self._next % len(self._workers)]
        self._next += 1
        call = worker.generate.remote(torch.tensor([request.token_ids]), [request.seed], request.sampling, version)
        (found,) = await asyncio.wrap_future(call.future())
        return found

    def update_weights(self, transport: WeightTransport, version: int) -> None:
        self._pooled.update_weights(transport, version)

    def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[list[np.ndarray]]:
        return self._pooled.score(sequences, temperature)

    def weight_fingerprints(self, number_format: str) -> list[dict[str, str]]:
        return self._pooled.weight_fingerprints(number_format)

    def shutdown(self) -> None:
        self._pooled.shutdown()
