# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's data-parallel wrapper, optimizer and learning-rate schedule, built from the configuration."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.megatron.checkpoint.inner_optimizers import optimizer_parts
from nemo_rl_moe.models.megatron.cpu import cpu_backend  # before megatron.core
from nemo_rl_moe.models.megatron.layers.recurrent_mixer import RecurrentMixer
from nemo_rl_moe.models.megatron.layers.routers import unconverted_state
from nemo_rl_moe.models.megatron.model.transformer_config import DTYPES
from nemo_rl_moe.models.megatron.model.vision_model import tower_buffers_in_float32

CHUNK_PARAMETERS = 2**28
"""Number of parameters that an Adam with moments in bfloat16 updates at a time: 2 GiB of float32 copies."""


def step_in_chunks(adam: Any, most_parameters: int) -> None:
    """Let Transformer Engine's Adam update at most `most_parameters` at a time, with the same result.

    Adam makes float32 copies of the bfloat16 moments of an entire parameter group. For the experts' group, these copies
    need more memory than bfloat16 moments save.
    """
    step_of_groups = adam.step

    def step(*arguments: Any, **keywords: Any) -> None:
        groups = adam.param_groups
        try:
            for group in groups:
                counted = {}
                for tensors in _chunks(group["params"], most_parameters):
                    chunk = {**group, "params": tensors}
                    adam.param_groups = [chunk]
                    step_of_groups(*arguments, **keywords)
                    counted = {"step": chunk["step"]}
                group.update(counted)
        finally:
            adam.param_groups = groups

    adam.step = step


def _chunks(tensors: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    chunk: list[Tensor] = []
    for tensor in tensors:
        if chunk and sum(other.numel() for other in chunk) + tensor.numel() > most:
            yield chunk
            chunk = []
        chunk.append(tensor)
    if chunk:
        yield chunk


def half_precision_modules(config: TransformerConfig, chunks: Sequence[GPTModel]) -> list[MegatronModule]:
    """Return the chunks with weights in the configuration's number format, except for the state of routers and indexers
    and the frequencies of a vision tower."""
    with unconverted_state(chunks), tower_buffers_in_float32(chunks):
        return [Float16Module(config, chunk) if config.bf16 else chunk for chunk in chunks]


def wrap_data_parallel(
    policy: PolicyConfig, config: TransformerConfig, modules: Sequence[MegatronModule]
) -> list[DistributedDataParallel]:
    """Return the chunks wrapped for gradient reduction, and set the schedule's gradient functions in `config`."""
    chosen = policy.megatron_cfg.distributed_data_parallel_config
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=chosen.grad_reduce_in_fp32,
        overlap_grad_reduce=chosen.overlap_grad_reduce,
        overlap_param_gather=chosen.overlap_param_gather,
        bucket_size=chosen.bucket_size,
        use_distributed_optimizer=chosen.use_distributed_optimizer,
        check_for_nan_in_grad=False,
    )
    wrapped = [
        # Buckets are for overlap. Gradients of later chunks are complete first, so only the first chunk needs buckets.
        DistributedDataParallel(config=config, ddp_config=ddp_config, module=module, disable_bucketing=index > 0)
        for index, module in enumerate(modules)
    ]
    if chosen.overlap_param_gather:
        for chunk in wrapped:
            _wait_for_weights_of_uncalled_modules(chunk)
    config.finalize_model_grads_func = finalize_model_grads
    if chosen.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return wrapped


def _wait_for_weights_of_uncalled_modules(chunk: DistributedDataParallel) -> None:
    """Let a module that reads another's weights without a call wait for them. Megatron-Core waits in calls."""

    def wait_for(read: Sequence[nn.Parameter]) -> None:
        for parameter in read:
            if (group := chunk.param_to_bucket_group.get(parameter)) is not None:  # None: frozen
                group.finish_param_sync()

    for reader, read in _reads_without_call(chunk):
        reader.register_forward_pre_hook(lambda _module, _inputs, read=read: wait_for(read))


def _reads_without_call(chunk: DistributedDataParallel) -> Iterator[tuple[nn.Module, Sequence[nn.Parameter]]]:
    """Yield pairs of a called module, and the weights of another that are read in the call or right after it."""
    for module in chunk.modules():
        if isinstance(module, RecurrentMixer):
            yield module, list(module.conv1d.parameters())
        if isinstance(module, GPTModel) and module.post_process:  # the chunked head is after the last norm
            yield module.decoder.final_layernorm, list(module.output_layer.parameters())
        # A measurement reads the gate before the call of the shared experts. With overlap they are never called.
        if isinstance(module, MoELayer) and getattr(module.shared_experts, "gate_weight", None) is not None:
            yield module, [module.shared_experts.gate_weight]


def build_optimizer(
    policy: PolicyConfig, config: TransformerConfig, chunks: Sequence[DistributedDataParallel]
) -> MegatronOptimizer:
    """Return Adam, with float32 master weights for bfloat16 training, and weight decay on matrices only."""
    try:
        optimizer_config = _optimizer_config(policy, config)
    except (AssertionError, RuntimeError, ValueError) as error:
        raise ConfigurationError(
            f"policy.megatron_cfg.optimizer: Megatron-Core refuses these settings: {error}"
        ) from error
    # Without the overrides, norms and biases would decay too.
    optimizer: MegatronOptimizer = get_megatron_optimizer(
        optimizer_config,
        list(chunks),
        config_overrides=get_standard_config_overrides(optimizer_config),
        use_gloo_process_groups=False,
    )
    _fuse_adam(optimizer)
    if "bfloat16" in (policy.megatron_cfg.optimizer.exp_avg_dtype, policy.megatron_cfg.optimizer.exp_avg_sq_dtype):
        for part in optimizer_parts(optimizer):
            step_in_chunks(part.optimizer, CHUNK_PARAMETERS)
    if config.bf16:
        config.grad_scale_func = optimizer.scale_loss
    return optimizer


def _optimizer_config(policy: PolicyConfig, config: TransformerConfig) -> OptimizerConfig:
    chosen, parallel = policy.megatron_cfg.optimizer, policy.megatron_cfg.distributed_data_parallel_config
    # A precision-aware optimizer uses the buffers' gradients as main gradients.
    precision_aware = chosen.use_precision_aware_optimizer
    gradients = torch.bfloat16 if precision_aware and not parallel.grad_reduce_in_fp32 else torch.float32
    return OptimizerConfig(
        optimizer="adam",
        lr=chosen.lr,
        min_lr=chosen.end_lr,
        weight_decay=chosen.weight_decay,
        adam_beta1=chosen.adam_beta1,
        adam_beta2=chosen.adam_beta2,
        adam_eps=chosen.adam_eps,
        # No norm exceeds infinity: the norm is measured, and nothing is clipped.
        clip_grad=math.inf if policy.max_grad_norm is None else policy.max_grad_norm,
        bf16=config.bf16,
        params_dtype=DTYPES[policy.precision],
        use_distributed_optimizer=parallel.use_distributed_optimizer,
        overlap_param_gather=parallel.overlap_param_gather,
        use_precision_aware_optimizer=precision_aware,
        main_grads_dtype=gradients,
        exp_avg_dtype=DTYPES[chosen.exp_avg_dtype],
        exp_avg_sq_dtype=DTYPES[chosen.exp_avg_sq_dtype],
        # Checkpoints contain full masters, so any kind of optimizer can load them.
        store_param_remainders=False,
        optimizer_cpu_offload=chosen.optimizer_cpu_offload,
        optimizer_offload_fraction=chosen.optimizer_offload_fraction,
        overlap_cpu_optimizer_d2h_h2d=chosen.overlap_cpu_optimizer_d2h_h2d,
        pin_cpu_grads=not cpu_backend.ACTIVE,
        pin_cpu_params=not cpu_backend.ACTIVE,
    )


def _fuse_adam(optimizer: MegatronOptimizer) -> None:
    """Let torch's AdamW (Megatron-Core's choice without Transformer Engine and Apex) update in one pass."""
    # Otherwise AdamW makes a dozen passes over each tensor. Megatron-Core has no setting for the fused update.
    for part in optimizer_parts(optimizer):
        if isinstance(part.optimizer, torch.optim.AdamW):
            for group in part.optimizer.param_groups:
                group["fused"] = True


def gather_weights(chunks: Sequence[DistributedDataParallel]) -> None:
    """Gather the updated weights if parameter gathers overlap. Every rank calls it.

    Otherwise refits, checkpoints and exports would read old weights. Forward passes wait by themselves.
    """
    for chunk in chunks:
        if not chunk.ddp_config.overlap_param_gather:
            continue
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            # An outstanding gather is of the weights before the update, and Megatron-Core would take it for this one.
            if group.param_gather_handle is not None:
                group.param_gather_handle.wait()
                group.param_gather_handle = None
        chunk.start_param_sync(force_sync=True)


def step_if_finite(optimizer: MegatronOptimizer, *, may_update: bool) -> tuple[float, bool]:
    """Take one optimizer step if `may_update` is true and the gradient is finite.

    Returns the gradient's norm, and whether the weights were updated.

    Clipping multiplies by the norm's inverse, so a gradient with one NaN would make every weight NaN.
    """
    assert isinstance(optimizer, ChainedOptimizer)  # its step measures the norm over all ranks, clips, then updates
    norm = math.nan

    def measure_and_keep() -> float:
        nonlocal norm
        norm = float(measure() or 0.0)
        return norm

    def update_if_finite() -> bool:
        return bool(may_update and math.isfinite(norm) and update())

    measure, update = optimizer.get_grad_norm, optimizer.step_with_ready_grads
    optimizer.get_grad_norm, optimizer.step_with_ready_grads = measure_and_keep, update_if_finite
    try:
        is_updated, _, _ = optimizer.step()
    finally:
        del optimizer.get_grad_norm, optimizer.step_with_ready_grads
    return norm, bool(is_updated)


def build_scheduler(policy: PolicyConfig, optimizer: MegatronOptimizer, num_steps: int) -> OptimizerParamScheduler:
    """Return the schedule with linear warm-up and the configured decay, at the tick of the first step.

    Each optimizer step is one tick. With a warm-up of `w` steps, the first step trains at tick 1: step `k` of the
    warm-up trains at `lr * k / w`, and tick 0 would have a rate of 0. Without a warm-up, the first step trains at tick
    0, at `lr`.
    """
    chosen, rates = policy.megatron_cfg.scheduler, policy.megatron_cfg.optimizer
    # Megatron-Core requires that the warm-up ends before the decay does, even if the run is shorter.
    decay_steps = max(chosen.lr_decay_iters or num_steps, chosen.lr_warmup_iters + 1)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=rates.lr,
        min_lr=rates.end_lr,
        lr_warmup_steps=chosen.lr_warmup_iters,
        lr_decay_steps=decay_steps,
        lr_decay_style=chosen.lr_decay_style,
        start_wd=rates.weight_decay,
        end_wd=rates.weight_decay,
        wd_incr_steps=decay_steps,
        wd_incr_style="constant",
    )
    scheduler.step(1 if chosen.lr_warmup_iters else 0)
    return scheduler
