# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Models, batches and configurations small enough for a test, and the frame that a rank runs a test's code in."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad
from transformers import Qwen3Config, Qwen3MoeConfig

from nemo_rl_moe.config.loading import load_config, load_grpo_config
from nemo_rl_moe.config.schema_grpo import GeneratingPolicyConfig
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import Destination, GlobalBatchShard, TokenBatch, make_shard, per_token
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.models.candidates import CANDIDATE_IDS, Candidates
from nemo_rl_moe.models.images import IS_IMAGE
from tests.support.rank_state import keep_process_groups

NUM_SEQUENCES = 8
MICROBATCHES = ((0, 1), (2, 3), (4, 5), (6, 7))

# A large Adam epsilon keeps the update from turning rounding noise of tiny gradients into whole steps.
_TEST_SETTINGS = (
    "policy.train_global_batch_size=8",
    "policy.train_micro_batch_size=2",
    "policy.init_seed=1234",
    "policy.megatron_cfg.moe_aux_loss_coeff=0.05",
    "policy.megatron_cfg.optimizer.lr=3.0e-3",
    "policy.megatron_cfg.optimizer.weight_decay=0.1",
    "policy.megatron_cfg.optimizer.adam_eps=1.0e-5",
    "policy.megatron_cfg.scheduler.lr_warmup_iters=0",
)


TINY: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 64,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
"""Fields of the tiny models, dense or with experts."""


def tiny_hf_config(**changes: Any) -> Qwen3MoeConfig:
    """Return the four layers of eight experts, grouped-query attention, a vocabulary of 64."""
    fields: dict[str, Any] = {
        **TINY,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.01,
        "mlp_only_layers": [],
    }
    return Qwen3MoeConfig(**{**fields, **changes})


def tiny_policy(world_size: int = 1, **changes: Any) -> PolicyConfig:
    """Return the tiny exemplar's policy with settings for tests.

    Args:
        world_size: Number of ranks, for the checks of the configuration.
        changes: Keys of `policy` or, where it has none of that name, of `policy.megatron_cfg`; two underscores for a
            dot.
    """
    overrides = _overrides(PolicyConfig, world_size, changes)
    return load_config("examples/configs/sft_tiny_moe.yaml", overrides, check_paths=False).policy


def tiny_grpo_policy(world_size: int = 1, **changes: Any) -> GeneratingPolicyConfig:
    """Return the tiny GRPO exemplar's policy with the same settings for tests, with keys of GRPO besides."""
    overrides = _overrides(GeneratingPolicyConfig, world_size, changes)
    overrides += ["grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=2"]
    return load_grpo_config("examples/configs/grpo_tiny_moe.yaml", overrides, check_paths=False).policy


def _overrides(schema: type[PolicyConfig], world_size: int, changes: Mapping[str, Any]) -> list[str]:
    overrides = [*_TEST_SETTINGS, f"cluster.cpu_workers_per_node={world_size}"]
    for name, value in changes.items():
        top = name.split("__")[0]
        section = "policy" if top in schema.model_fields else "policy.megatron_cfg"
        overrides.append(f"{section}.{name.replace('__', '.')}={_as_yaml(value)}")
    return overrides


def _as_yaml(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def layout(**sizes: int) -> dict[str, Any]:
    """Return the short names of a layout (tp, pp, vpp, first, last, ep, etp) as keys of `megatron_cfg`."""
    names = {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "vpp": "virtual_pipeline_model_parallel_size",
        "first": "num_layers_in_first_pipeline_stage",
        "last": "num_layers_in_last_pipeline_stage",
        "ep": "expert_model_parallel_size",
        "etp": "expert_tensor_parallel_size",
    }
    return {names[name]: size for name, size in sizes.items()} | {"sequence_parallel": sizes.get("tp", 1) > 1}


def sharing_sequences(policy: Any, num_ranks: int) -> Any:
    """Return the policy with context parallelism, which a configuration for CPUs cannot ask for."""
    megatron = policy.megatron_cfg.model_copy(update={"context_parallel_size": num_ranks})
    return policy.model_copy(update={"megatron_cfg": megatron})


def tiny_batch(seed: int, vocabulary_size: int = 64, shortest: int = 5, longest: int = 17) -> TokenBatch:
    """Return the eight random sequences of different lengths; the first three tokens of each are the prompt."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (NUM_SEQUENCES,), generator=generator)
    real = torch.arange(longest)[None] < lengths[:, None]
    trained = real.clone()
    trained[:, :3] = False
    return TokenBatch(
        input_ids=torch.randint(1, vocabulary_size, (NUM_SEQUENCES, longest), generator=generator) * real,
        lengths=lengths,
        token_mask=trained,
        sample_ids=tuple(f"sample {index}" for index in range(NUM_SEQUENCES)),
    )


def with_image_tokens(batch: TokenBatch, seed: int = 7) -> TokenBatch:
    """Return the batch with a mask of image tokens, as a model with vision has it: on none of its sequences' last
    tokens, on none at all of two sequences, and on padding too, where it says nothing.
    """
    rows, width = batch.input_ids.shape
    is_image = torch.rand(rows, width, generator=torch.Generator().manual_seed(seed)) < 0.4
    is_image[2] = is_image[6] = False
    is_image &= torch.arange(width) != (batch.lengths - 1)[:, None]
    return batch.with_columns(**{IS_IMAGE: per_token(is_image, Destination.MODEL, fill=False)})


def shard_of_rank(
    batch: TokenBatch,
    data_parallel_rank: int = 0,
    data_parallel_size: int = 1,
    microbatches: Sequence[Sequence[int]] = MICROBATCHES,
) -> GlobalBatchShard:
    """Return the block of the microbatches that one data-parallel rank runs."""
    count = len(microbatches) // data_parallel_size
    mine = microbatches[data_parallel_rank * count : (data_parallel_rank + 1) * count]
    return make_shard(batch, mine, batch)


def logprobs_by_sequence(
    trainer: Any, shard: GlobalBatchShard, whole: TokenBatch, microbatches: Sequence[Sequence[int]]
) -> dict[int, np.ndarray]:
    """Return the log-probabilities of this rank's share of a batch, by the sequence's index; empty where no loss is
    computed.
    """
    place = trainer.coordinates
    count = len(microbatches) // place.data_parallel_size
    mine = microbatches[place.data_parallel_rank * count :][:count]
    return {
        index: found[: int(whole.lengths[index])].numpy()
        for indices, values in zip(mine, trainer.logprobs(shard.microbatches), strict=False)
        for index, found in zip(indices, values, strict=True)
    }


@contextmanager
def parallel_job(policy: PolicyConfig) -> Iterator[int]:
    """Join the job's process groups and leaves nothing of Megatron-Core's global state behind. Gives the rank."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.moe.router import TopKRouter

    from nemo_rl_moe.models.megatron.model.parallel_state import (
        destroy_parallel_state,
        initialize_parallel_state,
        shared_gloo_device,
    )

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    apply_expert_bias = TopKRouter._apply_expert_bias
    # As a worker does it: a network thread for each of twenty groups would be most of what a small job does.
    with shared_gloo_device():
        initialize_parallel_state(policy.megatron_cfg, rank, world_size, rank, seed=7)
    try:
        yield rank
    finally:
        keep_process_groups()
        destroy_parallel_state()
        TopKRouter._apply_expert_bias = apply_expert_bias
        MoEAuxLossAutoScaler.main_loss_backward_scale = None
        forget_recorded_losses()


def forget_recorded_losses() -> None:
    """Clear Megatron-Core's global record of auxiliary losses, whose size is the first model's number of layers."""
    from nemo_rl_moe.models.megatron.model.releases import HAS_MOE_METRICS_TRACKER

    if HAS_MOE_METRICS_TRACKER:
        from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

        destroy_moe_metrics_tracker()
    else:
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        get_moe_layer_wise_logging_tracker().clear()


def tiny_dense_hf_config(**changes: Any) -> Qwen3Config:
    """Return the four layers, grouped-query attention, a vocabulary of 64."""
    return Qwen3Config(**{**TINY, **changes})


@dataclass
class BigramModel:
    """Answers as the workers of a model do.

    Attributes:
        logits: Row by the present token, column by the next one.
        asked: Batches that it has seen.
    """

    logits: Float[Tensor, "vocabulary vocabulary"]
    asked: list[TokenBatch] = field(default_factory=list)

    def next_logprobs(self, batch: TokenBatch) -> Float[Tensor, "batch targets vocabulary"]:
        """Log-probabilities of all tokens in the place of each one but the first."""
        return self.logits[batch.input_ids[:, :-1]].log_softmax(-1)

    def start_logprobs(self, batch: TokenBatch) -> Callable[[], Tensor]:
        self.asked.append(batch)
        found = self.next_logprobs(batch).gather(-1, batch.input_ids[:, 1:, None])[..., 0]
        return lambda: pad(found, (1, 0))

    def start_candidate_logprobs(self, batch: TokenBatch) -> Callable[[], Tensor]:
        self.asked.append(batch)
        ids = batch.columns[CANDIDATE_IDS].values[:, :-1]  # where they are predicted
        found = self.next_logprobs(batch).gather(-1, ids.long())
        return lambda: pad(found, (0, 0, 1, 0))

    def start_top_candidates(self, batch: TokenBatch, k: int, vocabulary_size: int) -> Callable[[], Candidates]:
        self.asked.append(batch)
        values, ids = self.next_logprobs(batch)[..., :vocabulary_size].topk(k)
        return lambda: Candidates(pad(ids, (0, 0, 1, 0)).to(torch.int32), pad(values, (0, 0, 1, 0)))

    def prepare_for_logprobs(self, clock: PhaseClock) -> None:
        """Do nothing."""
