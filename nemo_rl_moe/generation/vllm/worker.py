# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The Ray actor of one vLLM engine."""

import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from jaxtyping import Float

from nemo_rl_moe.distributed.batch import ModelInput
from nemo_rl_moe.distributed.node_tools import folder_of_this_process
from nemo_rl_moe.distributed.object_store import HeldObjects
from nemo_rl_moe.distributed.stored_rows import RowStore, StoredRows
from nemo_rl_moe.distributed.worker_process import outlive_requests_to_stop
from nemo_rl_moe.generation.interface import (
    GeneratedSequence,
    GenerationRequest,
    PromptScores,
    SamplingParameters,
    store_captured,
)
from nemo_rl_moe.generation.vllm import releases
from nemo_rl_moe.generation.vllm.adapters import AdapterSettings, selection
from nemo_rl_moe.generation.vllm.config import PrefixCaching
from nemo_rl_moe.generation.vllm.images import ImagePrompts, ImageSettings, register
from nemo_rl_moe.generation.vllm.receiving import fingerprints, receive
from nemo_rl_moe.weight_sync.transport import TransportSpec

_LONGEST_REASON = 500


@dataclass(frozen=True)
class VllmSettings:
    """Settings of one engine, sent to its actor. See also `VllmConfig`.

    Attributes:
        model_files: Name -> content of the files of the model's folder. The folder has no weights, because the
            trainer sends them.
        decodes_text: Whether to load the tokenizer from `model_files`, for stop strings.
        max_tokens: Maximum length of a sequence, prompt included.
        seed: Seed of the engine's random generator, which requests share on GPUs. On CPUs each request has its own
            seed.
        num_threads: Number of threads of one engine on CPUs.
        captures_routes: Whether to return the routed experts of sequences.
        image_settings: None for a text model.
        adapters: Adapters that refits replace, while the base stays; None if weights arrive merged.
    """

    model_files: Mapping[str, bytes]
    decodes_text: bool
    dtype: str
    max_tokens: int
    max_sequences: int | None
    seed: int
    on_gpus: bool
    tensor_parallel_size: int
    expert_parallel: bool
    gpu_memory_utilization: float
    cpu_cache_gib: int
    num_threads: int
    gpus: tuple[int, ...] = ()
    prefix_caching: PrefixCaching = "none"
    captures_routes: bool = False
    image_settings: ImageSettings | None = None
    adapters: AdapterSettings | None = None


class VllmWorker:  # pragma: no cover  (runs in another process)
    def __init__(self, settings: VllmSettings, search_path: Sequence[str]):
        outlive_requests_to_stop()
        sys.path += [folder for folder in search_path if folder not in sys.path]
        self._settings = settings
        self._steps = releases.StepCount()
        self._stored = HeldObjects()
        self._added: SimpleQueue[Mapping[int, GenerationRequest]] = SimpleQueue()
        self._breaks_off = threading.Event()
        self._engine: Any = None
        self._folder: Path | None = None
        self._num_refits = 0

    def start(self) -> str | None:
        """Import vLLM and build the model with random weights; return the problem in one line, or None."""
        try:
            self._start()
        except Exception as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())[:_LONGEST_REASON]}"
        return None

    def _start(self) -> None:
        settings = self._settings
        releases.set_environment(on_gpus=settings.on_gpus)
        if not settings.on_gpus:
            os.environ["OMP_NUM_THREADS"] = str(settings.num_threads)
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(settings.cpu_cache_gib))
        elif settings.gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, settings.gpus))
        # Kept until the process ends: tokenizers read their files late. The folder also gets vLLM's temporary files.
        self._folder = folder_of_this_process(Path(tempfile.gettempdir()), "vllm")
        os.environ["TMPDIR"] = tempfile.tempdir = str(self._folder)
        model = self._folder / "model"
        model.mkdir()
        for name, content in settings.model_files.items():
            (model / name).write_bytes(content)
        more: dict[str, Any] = {"dtype": settings.dtype}
        if settings.max_sequences is not None:
            more["max_num_seqs"] = settings.max_sequences
        if not settings.on_gpus:
            # After a chunk of a prompt vLLM resets the request's generator, which raises for CPU generators.
            more["enable_chunked_prefill"] = False
            if settings.adapters is not None:
                releases.choose_kernels_without_adapters()
        else:
            more |= {
                "gpu_memory_utilization": settings.gpu_memory_utilization,
                "enable_expert_parallel": settings.expert_parallel,
                "enable_sleep_mode": True,
                # On Blackwell vLLM would choose a kernel that shuffles experts, for which refits are not known to work.
                "moe_backend": "triton",
                # In a placement group vLLM would start Ray actors, but the group's GPUs are already in use.
                "distributed_executor_backend": "mp" if settings.tensor_parallel_size > 1 else "uni",
            }
            if settings.captures_routes:
                more["worker_extension_cls"] = "nemo_rl_moe.generation.vllm.worker_extension.WorkerExtension"
        if settings.adapters is not None:
            more |= settings.adapters.engine_arguments()
        if settings.image_settings is not None:
            more |= register(settings.image_settings)
        else:
            described = json.loads(settings.model_files.get("config.json", "{}"))
            releases.register_text_models(described.get("architectures") or [])
        self._engine = releases.make_engine(
            {
                "model": str(model),
                "skip_tokenizer_init": not settings.decodes_text,
                "load_format": "dummy",
                "max_model_len": settings.max_tokens,
                "tensor_parallel_size": settings.tensor_parallel_size,
                "seed": settings.seed,
                # Compiling for a CPU takes minutes.
                "enforce_eager": not settings.on_gpus,
                # Ignore the sampling settings in the model's folder.
                "generation_config": "vllm",
                "enable_prefix_caching": settings.prefix_caching != "none",
                "disable_log_stats": True,
                **more,
            }
        )
        self._engine.collective_rpc(_prepare, args=(settings.captures_routes,))
        releases.count_steps(self._engine, self._steps)

    def close(self) -> None:
        """Remove the model's files. The process is killed afterwards."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def process_id(self) -> int:
        return os.getpid()

    def window(self) -> int | None:
        """Return the number of requests to keep in the engine, including waiting ones; None for no limit."""
        return releases.window(self._engine)

    def num_steps(self) -> int:
        return self._steps.value

    def add(self, requests: Mapping[int, GenerationRequest]) -> None:
        """Add requests to the running `generate`, or to its next call."""
        self._added.put(requests)

    def break_off(self, is_wanted: bool) -> None:
        """Make `generate` return each sequence with its tokens so far (True), or complete sequences again (False)."""
        if is_wanted:
            self._breaks_off.set()
        else:
            self._breaks_off.clear()

    def generate(
        self, requests: Mapping[int, GenerationRequest], version: int
    ) -> Iterator[list[tuple[int, GeneratedSequence]]]:
        """Yield the sequences that finish in a step, each with the number of its request."""
        self._added.put(requests)
        prompts = ImagePrompts(self._settings.image_settings)
        taken: dict[int, GenerationRequest] = {}
        self._engine.collective_rpc(_record_routes, args=(True,))
        try:
            while self._take_added(taken, prompts) or self._engine.has_unfinished_requests():
                outputs = releases.broken_off(self._engine) if self._breaks_off.is_set() else []
                outputs = outputs or self._engine.step()
                if finished := [output for output in outputs if output.finished]:
                    numbers = [int(output.request_id) for output in finished]
                    yield list(zip(numbers, self._sequences(finished, taken, version), strict=True))
                    for number in numbers:  # a stream may last as long as the engine
                        del taken[number]
        finally:
            self._engine.collective_rpc(_record_routes, args=(False,))

    def _take_added(self, taken: dict[int, GenerationRequest], prompts: ImagePrompts) -> bool:
        """Pass the added requests to the engine; return whether there were any."""
        num_before = len(taken)
        while not self._added.empty():
            for number, request in self._added.get().items():
                taken[number] = request
                prompt = prompts.prompt(request.token_ids, request.model_inputs)
                # On a GPU each seed needs a separate kernel in every step, and samples are not repeatable anyway.
                seed = None if self._settings.on_gpus else request.seed
                self._ask(number, prompt, sampling_of(request.sampling, seed))
        return len(taken) > num_before

    def _ask(self, number: int, prompt: Any, sampling: Any) -> None:
        """Pass a request to the engine, with the adapter of the last refit."""
        adapter = None if self._settings.adapters is None else selection(self._num_refits)
        self._engine.add_request(str(number), prompt, sampling, lora_request=adapter)

    def _sequences(
        self, outputs: Sequence[Any], requests: Mapping[int, GenerationRequest], version: int
    ) -> list[GeneratedSequence]:
        """Return the sequences of finished outputs. Their routed experts are put into Ray's object store."""
        found = [sequence_of(output, version) for output in outputs]
        if self._settings.prefix_caching != "none":
            pairs = zip(found, outputs, strict=True)
            found = [replace(sequence, num_cached_tokens=output.num_cached_tokens or 0) for sequence, output in pairs]
        # A sequence that was aborted at once has no forward pass.
        begun = [number for number, sequence in enumerate(found) if len(sequence.token_ids)]
        if not self._settings.captures_routes or not begun:
            return found
        fed = {
            outputs[number].request_id: len(requests[int(outputs[number].request_id)].token_ids)
            + len(found[number].token_ids)
            - 1
            for number in begun
        }
        # Every rank of an engine routes all tokens.
        (routes, *_) = self._engine.collective_rpc(_take_routes, args=(fed,))
        if not all(name in routes for name in fed):
            return found
        with_routes = [
            replace(found[number], routed_experts=StoredRows.of(routes[outputs[number].request_id])) for number in begun
        ]
        for number, sequence in zip(begun, store_captured(with_routes, RowStore(put=self._stored.put)), strict=True):
            found[number] = sequence
        return found

    def score(
        self, sequences: Sequence[Sequence[int]], temperature: float, *model_inputs: Mapping[str, ModelInput]
    ) -> list[Float[np.ndarray, " tokens"]]:
        """Return the log-probability of each token after the first, given its prefix, in nats."""
        from vllm import SamplingParams

        prompts = ImagePrompts(self._settings.image_settings)
        inputs = model_inputs or ({},) * len(sequences)
        self._engine.collective_rpc(_set_prompt_temperature, args=(temperature,))
        for number, (tokens, of_sequence) in enumerate(zip(sequences, inputs, strict=True)):
            # An engine always samples one token. With `prompt_logprobs` vLLM does not read the prefix cache.
            sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
            self._ask(number, prompts.prompt(tokens, of_sequence), sampling)
        found: dict[int, Any] = {}
        while self._engine.has_unfinished_requests():
            found |= {int(output.request_id): output for output in self._engine.step() if output.finished}
        return [
            np.array(
                [each[token].logprob for each, token in zip(found[n].prompt_logprobs[1:], tokens[1:], strict=True)],
                dtype=np.float32,
            )
            for n, tokens in enumerate(sequences)
        ]

    def module_outputs(self, token_ids: Sequence[int]) -> dict[str, Float[np.ndarray, "tokens features"]]:
        """Return the output of every module for one sequence, by module name. Needs an engine of one rank."""
        (outputs,) = self._engine.collective_rpc(_with_outputs_noted, args=(partial(self.score, [token_ids], 1.0),))
        return dict(outputs)

    def weight_fingerprints(self, number_format: str) -> dict[str, str]:
        """Return the fingerprints of the stored weights by Hugging Face name. Needs an engine of one rank."""
        (found,) = self._engine.collective_rpc(fingerprints, args=(number_format, self._settings.adapters))
        return dict(found)

    def receive(self, spec: TransportSpec, first_receiver: int) -> str | None:
        """Receive weights on all ranks of the engine; return the problem or None.

        `first_receiver` is the number of the engine's first rank among all receivers of the transfer.
        """
        self._num_refits += 1
        kinds = self._settings.image_settings, self._settings.adapters
        try:
            problems = self._engine.collective_rpc(receive, args=(spec, first_receiver, self._num_refits, *kinds))
            # The scheduler would reuse image embeddings of the old tower.
            self._engine.reset_encoder_cache()
            if self._settings.prefix_caching == "reset" and not self._engine.reset_prefix_cache():
                return "its prefix cache cannot be reset: requests still use it"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return next((problem for problem in problems if problem is not None), None)

    def sleep(self) -> None:
        """Free the GPU memory of weights and key-value cache. The weights are lost."""
        if self._settings.on_gpus:
            self._engine.sleep(level=2)

    def wake(self, part: str) -> None:
        """Allocate the memory of `weights` or `kv_cache` again."""
        if self._settings.on_gpus:
            self._engine.wake_up(tags=[part])

    def asleep(self) -> list[str]:
        return releases.sleeping_parts(self._engine)


def _prepare(worker: Any, captures_routes: bool) -> None:
    from nemo_rl_moe.generation.vllm.routes import RouteRecorder

    runner = worker.model_runner
    worker.adapter_names = {}
    worker.prompt_temperature = releases.report_logprobs_at_temperature(runner)
    worker.routes = (getattr(runner, "route_recorder", None) or RouteRecorder(runner)) if captures_routes else None


def _record_routes(worker: Any, on: bool) -> None:
    if worker.routes is not None:
        worker.routes.start()
        worker.routes.is_on &= on


def _take_routes(worker: Any, num_fed: Mapping[str, int]) -> dict[str, Any]:
    taken = {name: worker.routes.take(name, count) for name, count in num_fed.items()}
    return {name: routes for name, routes in taken.items() if routes is not None}


def _set_prompt_temperature(worker: Any, temperature: float) -> None:
    worker.prompt_temperature.value = temperature


def _with_outputs_noted(worker: Any, forward: Callable[[], object]) -> dict[str, Any]:
    from nemo_rl_moe.generation.diagnosis import outputs_noted

    with outputs_noted(worker.model_runner.get_model()) as outputs:
        forward()
    return outputs


def sampling_of(sampling: SamplingParameters, seed: int | None) -> Any:
    """Return vLLM's form of sampling parameters. Without a seed the engine's generator is used."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k or 0,
        top_p=sampling.top_p,
        # torch's generators take 63 bits and a sign.
        seed=None if seed is None else seed & (2**63 - 1),
        stop_token_ids=list(sampling.stop_token_ids),
        stop=list(sampling.stop_strings) or None,
        # Only the request's stop tokens count.
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=1 if sampling.scores_prompt else None,
        detokenize=bool(sampling.stop_strings),
        # As in the trainer's own engine, a stop string may contain special tokens.
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def sequence_of(output: Any, version: int) -> GeneratedSequence:
    (completion,) = output.outputs
    logprobs = [each[token].logprob for each, token in zip(completion.logprobs, completion.token_ids, strict=True)]
    return GeneratedSequence(
        token_ids=np.array(completion.token_ids, dtype=np.int64),
        logprobs=np.array(logprobs, dtype=np.float32),
        is_truncated=completion.finish_reason == "length",
        weight_version=version,
        is_partial=completion.finish_reason == "abort",
        prompt_scores=None if output.prompt_logprobs is None else _prompt_scores(output),
    )


def _prompt_scores(output: Any) -> PromptScores:
    """Return the log-probabilities of an output's prompt. vLLM has an entry for each token and for the likeliest."""
    pairs = list(zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True))
    tops = [min(each.items(), key=lambda entry: entry[1].rank) for each, _ in pairs]
    return PromptScores(
        logprobs=np.array([each[token].logprob for each, token in pairs], dtype=np.float32),
        top_ids=np.array([token for token, _ in tops], dtype=np.int64),
        top_logprobs=np.array([entry.logprob for _, entry in tops], dtype=np.float32),
    )
