# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""vLLM's rules of sleeping, waking and pausing (0.32), for tests of what an engine is asked for and of whole runs.

- `sleep` pauses the scheduler and ends what is unfinished; level 1 keeps the weights, level 2 discards them. An engine
  whose weights sleep already stays as it is, with its cache or without.
- `wake_up` with a tag that does not sleep does nothing. The scheduler goes on when no tag sleeps any more.
- `step` of a paused scheduler returns an empty list at once, and the requests stay unfinished.

The model is a number, or one of transformers where its folder has a `config.json`. Of the number, with prefix caching
a token is that which the weights had when they first saw the prompt, until the cache is reset, which fails while
requests are unfinished. What happens is appended to the file that the environment variable `VLLM_STAND_IN_LOG` names,
a line each.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from nemo_rl_moe.generation.interface import SamplingParameters
from vllm.sampling_params import SamplingParams
from vllm.usage.usage_lib import UsageContext


class Answer(NamedTuple):
    tokens: Sequence[int]
    logprobs: Sequence[float]
    is_truncated: bool
    prompt_logprobs: Sequence[float] | None = None


class NumberModel:
    """Weights that are one number, that of the first tensor that was loaded; each token is that number."""

    def __init__(self) -> None:
        self.number = 0

    def load(self, tensors: Iterable[tuple[str, Any]]) -> None:
        first, *_ = [tensor for _, tensor in tensors]  # all of them are taken
        self.number = int(first.flatten()[0])

    def answer(self, prompt: Sequence[int], sampling: SamplingParams) -> Answer:
        return Answer([self.number] * sampling.max_tokens, [0.0] * sampling.max_tokens, is_truncated=True)


class TransformersModel:
    """A tiny model that samples and scores as vLLM does; its number is that of the loads so far.

    Args:
        folder: Holds the `config.json`.
        seed: Of the one generator that all requests draw from.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        from tests.support.transformers_engine import TransformersWorker

        self._worker = TransformersWorker(folder)
        self._seeds = torch.Generator().manual_seed(seed)
        self.prompt_temperature = 1.0
        self.number = 0

    def load(self, tensors: Iterable[tuple[str, Any]]) -> None:
        self._worker._load(iter(tensors))
        self.number += 1

    def answer(self, prompt: Sequence[int], sampling: SamplingParams) -> Answer:
        if sampling.prompt_logprobs is not None:
            (scores,) = self._worker.score([prompt], self.prompt_temperature)
            return Answer([0], [0.0], is_truncated=True, prompt_logprobs=[float(score) for score in scores])
        wanted = SamplingParameters(
            sampling.max_tokens, temperature=sampling.temperature, stop_token_ids=tuple(sampling.stop_token_ids)
        )
        seed = int(torch.randint(2**60, (), generator=self._seeds))
        (found,) = self._worker.generate(torch.tensor([prompt]), [seed], wanted, version=0)
        return Answer(found.token_ids.tolist(), found.logprobs.tolist(), found.is_truncated)


def model_of(folder: str, seed: int) -> NumberModel | TransformersModel:
    has_config = (Path(folder) / "config.json").is_file()
    return TransformersModel(Path(folder), seed) if has_config else NumberModel()


TAGS = ("weights", "kv_cache")
NO_MEMORY = "CUDA error: an illegal memory access was encountered"


def log(line: str) -> None:
    if path := os.environ.get("VLLM_STAND_IN_LOG"):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")


class EngineArgs:
    def __init__(self, **arguments: Any):
        self.arguments = arguments


@dataclass
class SchedulerOutput:
    total_num_scheduled_tokens: int


class Runner:
    """The runner of a model.

    Args:
        sleeping_tags: Tags whose memory is given back.
        model: Computes.

    Attributes:
        weights: The model's number; None: discarded, or never loaded.
    """

    def __init__(self, sleeping_tags: set[str], model: NumberModel | TransformersModel) -> None:
        self._sleeping_tags, self.model = sleeping_tags, model
        self.weights: int | None = None
        self.sampler = SimpleNamespace(forward=lambda *args: None, compute_logprobs=lambda logits: logits)
        self._model = nn.Module()

    def get_model(self) -> nn.Module:
        return self._model

    def reload_weights(self, weights_iterator: Iterator[tuple[str, Any]]) -> None:
        """Take all tensors, into the memory of the old ones."""
        if "weights" in self._sleeping_tags:
            raise RuntimeError(NO_MEMORY)
        self.model.load(weights_iterator)
        self.weights = self.model.number
        log(f"load {self.weights}")


class Executor:
    """The workers of an engine, of which there is one.

    Attributes:
        worker: The worker.
        sleeping_tags: Tags whose memory is given back.
        is_sleeping: True while there are any.
    """

    def __init__(self, model: NumberModel | TransformersModel) -> None:
        self.sleeping_tags: set[str] = set()
        self.worker = SimpleNamespace(rank=0, model_runner=Runner(self.sleeping_tags, model))
        self.is_sleeping = False

    def collective_rpc(self, method: Callable[..., Any], args: tuple[Any, ...] = ()) -> list[Any]:
        return [method(self.worker, *args)]

    def execute_model(self, scheduled: SchedulerOutput, non_block: bool = False) -> None:
        """Compute nothing; without weights or a cache a GPU would raise."""
        if self.sleeping_tags:
            raise RuntimeError(NO_MEMORY)

    def sleep(self, level: int) -> None:
        """Give all memory back."""
        if "weights" in self.sleeping_tags:
            log("sleep: already sleeping")
            return
        if level == 2:
            self.worker.model_runner.weights = None
        self.sleeping_tags.update(TAGS)
        self.is_sleeping = True
        log(f"sleep {level}")

    def wake_up(self, tags: Iterable[str]) -> None:
        """Take the memory of tags."""
        if not self.is_sleeping:
            log("wake: not sleeping")
            return
        for tag in tags:
            if tag not in self.sleeping_tags:
                log(f"wake: {tag} is not asleep")
                return
        self.sleeping_tags.difference_update(tags)
        self.is_sleeping = bool(self.sleeping_tags)
        log(f"wake {' '.join(tags)}")


class LLMEngine:
    """An engine whose core is in this process.

    Attributes:
        arguments: What it was made with.
        usage_context: Chooses sizes of batches.
        seeds: Of the requests so far.
    """

    def __init__(self, arguments: dict[str, Any], usage_context: UsageContext) -> None:
        self.arguments, self.usage_context = arguments, usage_context
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks=None))
        self.model_executor = Executor(model_of(arguments["model"], arguments["seed"]))
        self._is_paused = False
        self._unfinished: dict[str, tuple[int, SamplingParams]] = {}
        self._caches_prefixes: bool = arguments["enable_prefix_caching"]
        self._cached: dict[tuple[int, ...], int] = {}
        self._prompts: dict[str, tuple[int, ...]] = {}
        self.seeds: list[int | None] = []
        log("start")

    @classmethod
    def from_engine_args(
        cls, engine_args: EngineArgs, usage_context: UsageContext = UsageContext.ENGINE_CONTEXT
    ) -> "LLMEngine":
        return cls(engine_args.arguments, usage_context)

    def collective_rpc(self, method: Callable[..., Any], args: tuple[Any, ...] = ()) -> list[Any]:
        return self.model_executor.collective_rpc(method, args)

    def add_request(self, request_id: str, prompt: Any, params: SamplingParams, *, lora_request: None = None) -> None:
        assert lora_request is None  # without adapters
        self._unfinished[request_id] = (0, params)
        self.seeds.append(params.seed)
        self._prompts[request_id] = tuple(prompt["prompt_token_ids"])

    def has_unfinished_requests(self) -> bool:
        return bool(self._unfinished)

    def step(self) -> list[Any]:
        """Return one token more of each request; the finished ones."""
        if self._is_paused:
            return []
        self.model_executor.execute_model(SchedulerOutput(len(self._unfinished)), non_block=True)
        weights = self.model_executor.worker.model_runner.weights
        if weights is None:
            raise RuntimeError("tokens of discarded weights are asked for")
        self._unfinished = {name: (done + 1, params) for name, (done, params) in self._unfinished.items()}
        finished = {name: params for name, (done, params) in self._unfinished.items() if done == params.max_tokens}
        self._unfinished = {name: state for name, state in self._unfinished.items() if name not in finished}
        if finished:
            log(f"answer {len(finished)} with {weights}")
        return [self._output_of(name, params) for name, params in finished.items()]

    def _output_of(self, name: str, params: SamplingParams) -> Any:
        """Return a finished request, whose prompt is cached from now on."""
        prompt, worker = self._prompts.pop(name), self.model_executor.worker
        model = worker.model_runner.model
        if isinstance(model, TransformersModel):
            model.prompt_temperature = worker.prompt_temperature.value
            return output_of(name, prompt, model.answer(prompt, params), 0)
        cached_by = self._cached.get(prompt)
        if self._caches_prefixes:
            self._cached.setdefault(prompt, model.number)
        answer = model.answer(prompt, params)
        if cached_by is not None:
            answer = answer._replace(tokens=[cached_by] * len(answer.tokens))
        return output_of(name, prompt, answer, 0 if cached_by is None else len(prompt))

    def reset_prefix_cache(self) -> bool:
        """Forget all prompts; return False, and forget none, while requests are unfinished."""
        if self._unfinished:
            return False
        self._cached.clear()
        log("reset the prefix cache")
        return True

    def sleep(self, level: int = 1) -> None:
        """Pauses the scheduler, ends what is unfinished, gives memory back."""
        self._is_paused = True
        self._unfinished.clear()
        self.model_executor.sleep(level)

    def wake_up(self, tags: Iterable[str]) -> None:
        """Take memory; the scheduler goes on when all of it is there."""
        self.model_executor.wake_up(tags)
        if not self.model_executor.is_sleeping:
            self._is_paused = False

    def is_sleeping(self) -> bool:
        """Return True while the scheduler is paused or memory is given back."""
        return self._is_paused or self.model_executor.is_sleeping

    def reset_encoder_cache(self) -> None:
        """Nothing is kept."""


def output_of(request_id: str, prompt: Sequence[int], answer: Answer, num_cached: int) -> Any:
    def rows(tokens: Sequence[int], logprobs: Sequence[float]) -> list[dict[int, Any]]:
        return [{token: SimpleNamespace(logprob=value)} for token, value in zip(tokens, logprobs, strict=True)]

    completion = SimpleNamespace(
        token_ids=list(answer.tokens),
        logprobs=rows(answer.tokens, answer.logprobs),
        finish_reason="length" if answer.is_truncated else "stop",
    )
    scores = answer.prompt_logprobs
    return SimpleNamespace(
        request_id=request_id,
        outputs=[completion],
        finished=True,
        prompt_logprobs=None if scores is None else [None, *rows(prompt[1:], scores)],
        num_cached_tokens=num_cached,
    )
