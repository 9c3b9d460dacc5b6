# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What the checks of one GPU share: models, settings, batches of packed sequences, and measured steps.

A rehearsal takes other sizes and the CPUs: the same lines run, so that none runs first on a GPU.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.loading import load_config, load_grpo_config
from nemo_rl_moe.config.schema import GRPOMasterConfig, MasterConfig, SFTMasterConfig
from nemo_rl_moe.distributed.accelerators import peak_flops_per_second
from nemo_rl_moe.distributed.batch import Destination, GlobalBatchShard, TokenBatch, make_shard, per_sequence, per_token
from nemo_rl_moe.models.flops import forward_flops
from nemo_rl_moe.models.rank_results import RankTrainResult
from nemo_rl_moe.routing.replay import ROUTED_EXPERTS

Numbers = dict[str, Any]
"""What a check has measured, in values that JSON has."""

QWEN3_30B_A3B: Mapping[str, Any] = {
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
_SLICE_LAYERS = 4
# Sizes for which kernels are tuned, in a model that fits anywhere.
_SMALL: Mapping[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 128,
    "intermediate_size": 512,
    "vocab_size": 1024,
}
_TINY: Mapping[str, Any] = {
    **_SMALL,
    "hidden_size": 64,
    "head_dim": 16,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "intermediate_size": 64,
    "vocab_size": 256,
}
_PARTS = (2, 4, 8, 8)
"""A packed row has four sequences: a half, a quarter and two eighths of its tokens."""
BF16_MOMENTS: Mapping[str, Any] = {
    "megatron_cfg__optimizer__use_precision_aware_optimizer": True,
    "megatron_cfg__optimizer__exp_avg_dtype": "bfloat16",
    "megatron_cfg__optimizer__exp_avg_sq_dtype": "bfloat16",
}
"""Of the recipes for 80 GB; on CPUs there is no such optimizer."""


class Failed(AssertionError):
    """A check that did not hold, with what was measured."""

    def __init__(self, why: str, numbers: Mapping[str, Any]):
        super().__init__(why)
        self.numbers = dict(numbers)


def slice_config(*, rehearse: bool, **changes: Any) -> Any:
    """Return the Hugging Face configuration of four layers of Qwen3-30B-A3B."""
    from transformers import Qwen3MoeConfig

    fields = {**QWEN3_30B_A3B, "num_hidden_layers": _SLICE_LAYERS, **(_TINY if rehearse else {})}
    return Qwen3MoeConfig(**fields | changes)


def small_config(*, rehearse: bool) -> Any:
    """Return the configuration of a small model whose sizes are those of large ones."""
    return slice_config(rehearse=False, **(_TINY if rehearse else _SMALL))


def run_config(*, rehearse: bool, tokens: int | None = None, **changes: Any) -> SFTMasterConfig:
    """Return one rank's configuration with the settings of a shipped recipe: bfloat16, distributed optimizer, packing.

    Args:
        rehearse: On CPUs, in float32.
        tokens: Of a packed row.
        changes: Keys of `policy`; two underscores for a dot.
    """
    values = _one_rank(rehearse, tokens or (64 if rehearse else 4096), changes)
    values["policy.train_global_batch_size"] = 4 * len(_PARTS)
    return load_config("examples/configs/sft_qwen3_30b_a3b.yaml", _overrides(values), check_paths=False)


def recipe_config(*, rehearse: bool, tokens: int, **changes: Any) -> GRPOMasterConfig:
    """Return the recipe for Qwen3-30B-A3B on 8 GPUs of 80 GB, for one rank without the other seven.

    Args:
        tokens: Of a packed row, which is a microbatch.
        changes: Keys of `policy`, beside those of the recipe.
    """
    if rehearse:  # what only GPUs and Transformer Engine have
        changes |= {
            "megatron_cfg__optimizer__use_precision_aware_optimizer": False,
            "megatron_cfg__optimizer__exp_avg_dtype": "float32",
            "megatron_cfg__optimizer__exp_avg_sq_dtype": "float32",
        }
    values = _one_rank(rehearse, tokens, changes)
    values |= {"policy.generation.max_new_tokens": tokens // 2}
    values |= {"loss_fn.reference_policy_kl_penalty": 0.0}  # without the reference model
    return load_grpo_config("examples/configs/grpo_qwen3_30b_a3b_80gb.yaml", _overrides(values), check_paths=False)


def _one_rank(rehearse: bool, tokens: int, changes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "policy.init": "random",
        "policy.max_total_sequence_length": tokens,
        "policy.precision": "float32" if rehearse else "bfloat16",
        "policy.sequence_packing.enabled": "true",
        "policy.sequence_packing.train_mb_tokens": tokens,
        "policy.megatron_cfg.expert_model_parallel_size": 1,
        "cluster.num_nodes": 1,
        "cluster.gpus_per_node": 0 if rehearse else 1,
        "cluster.cpu_workers_per_node": 1,
        **{f"policy.{name.replace('__', '.')}": value for name, value in changes.items()},
    }


def _overrides(values: Mapping[str, Any]) -> list[str]:
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in values.items()]


def packed_shard(
    config: MasterConfig, vocabulary: int, seed: int, *, num_rows: int = 4, parts: Sequence[int] = _PARTS
) -> GlobalBatchShard:
    """Return packed rows of random tokens, each a microbatch of as many sequences as there are parts.

    Args:
        parts: Of the tokens of a row, by what they are divided.
    """
    tokens, generator = config.policy.max_total_sequence_length, torch.Generator().manual_seed(seed)
    lengths = torch.tensor([tokens // part for part in parts] * num_rows)
    size, longest = len(lengths), int(lengths.max())
    batch = TokenBatch(
        input_ids=torch.randint(1, vocabulary, (size, longest), generator=generator),
        lengths=lengths,
        token_mask=torch.arange(longest) < lengths[:, None],
        sample_ids=tuple(f"random:{index}" for index in range(size)),
    )
    batch = batch.with_columns(
        advantages=per_sequence(torch.linspace(-1, 1, size)),
        generation_logprobs=per_token(torch.full(batch.input_ids.shape, -1.0)),
    )
    rows = [range(first, first + len(parts)) for first in range(0, size, len(parts))]
    return make_shard(batch, rows, batch)


def with_routes(shard: GlobalBatchShard, hf_config: Any) -> GlobalBatchShard:
    """Return the shard with a capture of random experts for each token and layer, which routers replay."""
    generator = torch.Generator().manual_seed(0)

    def routed(batch: TokenBatch) -> TokenBatch:
        shape = (*batch.input_ids.shape, hf_config.num_hidden_layers, hf_config.num_experts)
        chosen = torch.rand(shape, generator=generator).topk(hf_config.num_experts_per_tok).indices.to(torch.int16)
        fed = torch.arange(batch.input_ids.shape[1]) < batch.lengths[:, None] - 1
        routes = chosen.where(fed[..., None, None], -1)
        return batch.with_columns(**{ROUTED_EXPERTS: per_token(routes, Destination.MODEL, fill=-1)})

    return replace(shard, microbatches=tuple(map(routed, shard.microbatches)))


def lengths_of(shard: GlobalBatchShard) -> list[int]:
    """Return the lengths of a shard's sequences."""
    return [int(length) for batch in shard.microbatches for length in batch.lengths]


@contextmanager
def weights_from_the_device() -> Iterator[None]:
    """Draw random weights where they lie, in one call each: drawn as always, by the host and for any layout, those of
    some billion parameters take minutes."""
    from nemo_rl_moe.models.megatron.weights import starting_weights
    from nemo_rl_moe.models.megatron.weights.parameter_layout import parameter_pieces

    @torch.no_grad()
    def draw(chunks: Sequence[Any], config: Any, hf_config: Any, seed: int) -> None:
        generator = None
        for piece in parameter_pieces(chunks, config):
            generator = generator or torch.Generator(piece.local.device).manual_seed(seed)
            if piece.name.endswith("layernorm.weight"):
                piece.local.fill_(1.0)
            else:
                piece.local.normal_(std=config.init_method_std, generator=generator)

    with mock.patch.object(starting_weights, "initialize_weights", draw):
        yield


def let_go(trainer: Any) -> None:
    """Give back the memory of a trainer that is not used any more.

    Deleting it does not: Megatron-Core's data parallelism and autograd's nodes refer to each other, which Python's
    collector does not see.
    """
    for chunk in trainer.ddp_chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            for tensor in (buffer.param_data, buffer.grad_data):
                if tensor is not None:
                    tensor.untyped_storage().resize_(0)
    for tensor in trainer.host_state._tensors():
        tensor.untyped_storage().resize_(0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def synchronize() -> None:
    """Wait for the GPU where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(function: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Return the seconds of a call, the device's included, and what it returns."""
    synchronize()
    began = time.perf_counter()
    result = function(*arguments)
    synchronize()
    return time.perf_counter() - began, result


def timed_step(trainer: Any, shard: GlobalBatchShard) -> tuple[float, Any]:
    """Return the seconds of one optimizer step, and its result."""
    return timed(trainer.train, [shard], sft_loss)


def speed(trainer: Any, shard: GlobalBatchShard, seconds: Sequence[float]) -> Numbers:
    """Return tokens a second and the share of the card's peak, by the median of steps on shards of one size.

    Operations are counted as for the metrics of runs: those of the model, without recomputation.
    """
    from nemo_rl_moe.models.megatron.model.transformer_config import attention_windows

    lengths, taken = lengths_of(shard), statistics.median(seconds)
    operations = forward_flops(trainer.config, trainer.hf_config.vocab_size, attention_windows(trainer.config))
    peak = peak_flops_per_second([torch.cuda.get_device_name()] if torch.cuda.is_available() else [""])
    rate = operations.training(lengths) / taken
    return {
        "seconds_per_step": round(taken, 4),
        "tokens_per_second": round(sum(lengths) / taken, 1),
        "tflops": round(rate / 1e12, 2),
        "mfu": None if peak is None else round(rate / peak, 4),
    }


def memory_of(config: MasterConfig, trainer: Any, result: RankTrainResult) -> Numbers:
    """Return what is held and was held at most in a step, beside what `plan` says; None for what only a GPU has."""
    from nemo_rl_moe.models.megatron.model.memory_estimate import worker_memory

    planned = worker_memory(config, trainer.config, trainer.hf_config, 0)
    # A step ends with its own report, and a new count.
    peak, reserved = (result.memory.get(f"max_memory_{kind}_gb") for kind in ("allocated", "reserved"))
    return {
        "held_bytes": torch.cuda.memory_allocated() if torch.cuda.is_available() else None,
        "planned_held_bytes": planned.always,
        "peak_bytes": None if peak is None else round(1e9 * peak.reduce()),
        "planned_peak_bytes_at_least": planned.peak_at_least,
        "reserved_bytes": None if reserved is None else round(1e9 * reserved.reduce()),
    }
