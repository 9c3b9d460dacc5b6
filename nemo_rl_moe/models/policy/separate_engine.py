# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core as a separate generation engine: a worker for each copy of the weights."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

import numpy as np
import ray
import torch
from jaxtyping import Float

from nemo_rl_moe.config.schema_grpo import GeneratingPolicyConfig
from nemo_rl_moe.distributed.batch import ModelInput, TokenBatch
from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.distributed.node_tools import THREADS
from nemo_rl_moe.distributed.shared_arrays import ArrayStore
from nemo_rl_moe.distributed.worker_group import WorkerGroup
from nemo_rl_moe.errors import GenerationError, WeightSyncError, WorkerDiedError
from nemo_rl_moe.generation.interface import (
    GeneratedSequence,
    GenerationBatch,
    GenerationEngine,
    GenerationRequest,
    PromptScores,
)
from nemo_rl_moe.generation.megatron_separate.batches import RequestBatches
from nemo_rl_moe.generation.megatron_separate.record import MegatronSeparateConfig
from nemo_rl_moe.models.hf_files import plain_config
from nemo_rl_moe.models.interfaces import Head
from nemo_rl_moe.models.megatron.training.measurements import top_candidates
from nemo_rl_moe.models.megatron.training.megatron_model import MegatronModel
from nemo_rl_moe.models.policy.start_rank import start_rank
from nemo_rl_moe.weight_sync.transport import TransportSpec, WeightTransport

if TYPE_CHECKING:
    from nemo_rl_moe.generation.registry import EngineSetup

Args = TypeVarTuple("Args")
Result = TypeVar("Result")

_SCORED_AT_A_TIME = 16
"""Number of prompts in one forward pass for their log-probabilities."""


class SeparateEngine(GenerationEngine):
    """Workers that each hold a full copy of the weights, and take requests as they arrive.

    A worker that dies or fails ends the run. Responses have routed experts if the configuration captures them.

    Args:
        copies: Started workers, each a separate job.
        max_batch_size: Maximum number of sequences that a copy generates at a time. With None, there is no maximum.
        vocabulary_size: Number of token ids.
    """

    can_score = True
    gives_fingerprints = True

    def __init__(self, copies: WorkerGroup[MegatronModel], max_batch_size: int | None, vocabulary_size: int):
        self._copies, self._max_batch_size, self._vocabulary_size = copies, max_batch_size, vocabulary_size
        self._requests = RequestBatches(self._generate, copies.world_size, max_batch_size)
        self._images = ArrayStore(ray.put)
        self._has_weights = False

    async def generate(self, request: GenerationRequest) -> GeneratedSequence:
        return await self._requests.answer(request)

    def update_weights(self, transport: WeightTransport, version: int) -> None:
        """Receive the weights that the trainer sends, on all copies, after the copies have answered their requests."""
        with self._requests.paused(), ThreadPoolExecutor(1) as thread:
            hold_weights, self._has_weights = self._has_weights, False
            spec = transport.open(self._copies.world_size, version, receivers=f"{id(self)}", hold_weights=hold_weights)
            received = thread.submit(self._receive, transport, spec, version)
            try:
                transport.send()
            except WeightSyncError:
                received.result()  # raises the error of a copy that failed
                raise
            received.result()
            self._has_weights = True

    def score(
        self, sequences: Sequence[Sequence[int]], temperature: float, *model_inputs: Mapping[str, ModelInput]
    ) -> list[list[Float[np.ndarray, " tokens"]]]:
        # The model uses `policy.generation.temperature`, which equals `temperature`.
        batch = _batch_of(sequences, model_inputs).with_shared_in(self._images)
        alone = [batch.select([index]) for index in range(len(sequences))]
        with self._requests.paused():
            by_copy = self._on_all(MegatronModel.logprobs, alone)
        return [[logprobs[0, 1:].numpy() for logprobs in found] for found in by_copy]

    def weight_fingerprints(self, number_format: str) -> list[dict[str, str]]:
        with self._requests.paused():
            return self._on_all(MegatronModel.weight_fingerprints, number_format)

    def shutdown(self) -> None:
        self._copies.shutdown()
        self._requests.shutdown()

    def _generate(self, copy: int, batch: GenerationBatch) -> list[GeneratedSequence]:
        if not self._has_weights:
            raise GenerationError("the engine has no weights yet: update_weights comes before the first request")
        found = self._on_one(copy, MegatronModel.generate, batch.with_shared_in(self._images), self._max_batch_size)
        if not batch.sampling.scores_prompt:
            return found
        scores = self._prompt_scores(copy, batch)
        return [replace(sequence, prompt_scores=each) for sequence, each in zip(found, scores, strict=True)]

    def _prompt_scores(self, copy: int, batch: GenerationBatch) -> list[PromptScores]:
        order = sorted(range(len(batch.prompts)), key=lambda index: len(batch.prompts[index]))
        parts = [order[start : start + _SCORED_AT_A_TIME] for start in range(0, len(order), _SCORED_AT_A_TIME)]
        batches = [_batch_of([batch.prompts[index] for index in part], ()) for part in parts]
        logprobs = self._on_one(copy, MegatronModel.logprobs, batches)
        likeliest = partial(top_candidates, k=1, vocabulary_size=self._vocabulary_size)
        tops = self._on_one(copy, MegatronModel.measure, batches, likeliest)
        scores: dict[int, PromptScores] = {}
        for part, own, (ids, highest) in zip(parts, logprobs, tops, strict=True):
            for row, index in enumerate(part):
                place = row, slice(1, len(batch.prompts[index]))
                scores[index] = PromptScores(
                    own[place].numpy(), ids[..., 0][place].numpy(), highest[..., 0][place].numpy()
                )
        return [scores[index] for index in range(len(order))]

    def _on_one(self, copy: int, method: Callable[[MegatronModel, *Args], Result], *args: *Args) -> Result:
        to_copies = [args if each == copy else None for each in range(self._copies.world_size)]
        return _answers(self._copies.start_each(method, to_copies))[copy]

    def _receive(self, transport: WeightTransport, spec: TransportSpec, version: int) -> None:
        """Wait until all copies have received the weights. An error of one copy ends the transfer for all copies."""
        to_copies = [(spec, copy, version) for copy in range(self._copies.world_size)]
        try:
            _answers(self._copies.start_each(MegatronModel.receive_weights, to_copies))
        except BaseException as error:
            transport.abort(str(error))
            raise

    def _on_all(self, method: Callable[[MegatronModel, *Args], Result], *args: *Args) -> list[Result]:
        return list(_answers(self._copies.start_each(method, [args] * self._copies.world_size)).values())


def _answers(wait: Callable[[], dict[int, Result]]) -> dict[int, Result]:
    try:
        return wait()
    except WorkerDiedError as error:
        raise GenerationError(f"generation engine megatron_separate: {error}") from error


def _batch_of(sequences: Sequence[Sequence[int]], model_inputs: Sequence[Mapping[str, ModelInput]]) -> TokenBatch:
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    input_ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(sequence) for sequence in sequences], batch_first=True)
    batch = TokenBatch(
        input_ids=input_ids,
        lengths=lengths,
        token_mask=torch.arange(input_ids.shape[1]) < lengths[:, None],
        sample_ids=("scored",) * len(sequences),
    )
    return batch.with_inputs(model_inputs) if model_inputs else batch


def on_one_rank(policy: GeneratingPolicyConfig) -> GeneratingPolicyConfig:
    """Return the policy's section for a rank with the full model, without adapters if merged weights arrive."""
    sizes = ("tensor_model", "pipeline_model", "expert_model", "expert_tensor", "context")
    stages = ("virtual_pipeline_model_parallel_size", "num_layers_in_first_pipeline_stage")
    layout = {f"{name}_parallel_size": 1 for name in sizes} | dict.fromkeys(
        (*stages, "num_layers_in_last_pipeline_stage")
    )
    megatron = policy.megatron_cfg.model_copy(update=layout | {"sequence_parallel": False})
    lora = policy.lora if policy.generation.lora_refit == "adapter" else None
    return policy.model_copy(update={"megatron_cfg": megatron, "lora": lora})


def start_copies(setup: "EngineSetup", places: RayCluster) -> WorkerGroup[MegatronModel]:
    """Start a worker for each copy, with the policy's initial weights."""
    policy = setup.config.policy
    section = policy.generation.section_of(MegatronSeparateConfig)
    threads = {name: str(section.cpu_threads) for name in (THREADS, "MKL_NUM_THREADS")}
    return WorkerGroup(
        places,
        partial(
            start_rank,
            policy=on_one_rank(policy),
            source=setup.source,
            hf_config=plain_config(setup.hf_config),
            seed=setup.config.grpo.seed,
            num_steps=None,
            keep_reference=False,
            decodes_text=policy.generation.stop_strings is not None,
            heads=(Head.LOGPROBS,),
        ),
        start_timeout_s=places.config.worker_start_timeout_s,
        call_timeout_s=places.config.worker_call_timeout_s,
        environment=policy.megatron_cfg.env_vars | ({} if places.config.gpus_per_node else threads),
        ranks_per_job=1,
    )


def make_separate_engine(setup: "EngineSetup") -> SeparateEngine:
    """Start the engine on the workers of `cluster.roles.generation`."""
    assert setup.own_cluster is not None  # a rule of the engine's record
    copies = start_copies(setup, setup.own_cluster)
    return SeparateEngine(copies, setup.config.policy.generation.max_batch_size, setup.hf_config.vocab_size)
