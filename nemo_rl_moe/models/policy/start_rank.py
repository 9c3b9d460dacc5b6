# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Start of one rank's model in the rank's process: process settings, layout, weights."""

import os
from collections.abc import Collection
from typing import Any

import torch

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.data.tokenizer import load_tokenizer
from nemo_rl_moe.distributed.object_store import RAY_STORE
from nemo_rl_moe.distributed.worker_process import keep_freed_memory
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.models.hf_files import ModelSource, load_config_json, weights_folder
from nemo_rl_moe.models.interfaces import Head
from nemo_rl_moe.models.megatron.model.agreement import agree_on_model
from nemo_rl_moe.models.megatron.model.parallel_state import initialize_parallel_state, shared_gloo_device
from nemo_rl_moe.models.megatron.model.transformer_engine import require_transformer_engine
from nemo_rl_moe.models.megatron.training.megatron_model import MegatronModel
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer


def _without_mtp(policy: PolicyConfig) -> PolicyConfig:
    """Return the settings without layers of multi-token prediction, which only training uses."""
    megatron = policy.megatron_cfg.model_copy(update={"mtp_num_layers": None})
    return policy.model_copy(update={"megatron_cfg": megatron})


def start_rank(  # pragma: no cover  (runs in another process)
    rank: int,
    world_size: int,
    *,
    policy: PolicyConfig,
    source: ModelSource,
    hf_config: Any,
    seed: int,
    num_steps: int | None,
    keep_reference: bool,
    decodes_text: bool,
    heads: Collection[Head],
) -> MegatronModel | UserError:
    """Start one rank of a model (`ModelWorkers`).

    Args:
        hf_config: The model's configuration, from `plain_config`.
        decodes_text: Whether to load the tokenizer, for stop strings.

    Returns:
        A `MegatronTrainer` if there are optimizer steps, otherwise a `MegatronModel`. If the model or its weights
        cannot be used, every rank returns the error.
    """
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if not torch.cuda.is_available():
        keep_freed_memory()
    # Steps that can fail on a single machine come before any collective. Their errors end this process, and the driver
    # notices this at once. After a collective, the other ranks would wait for this rank, and the reason would be lost.
    folder = source.folder()
    config_json = load_config_json(str(folder))
    settings = policy.tokenizer
    # The tokenizer is loaded only if needed, because it imports parts of transformers, which takes more than a second.
    tokenizer = load_tokenizer(settings.name, settings.chat_template) if decodes_text else None
    with shared_gloo_device():
        initialize_parallel_state(policy.megatron_cfg, rank, world_size, int(os.environ["LOCAL_RANK"]), seed)
    weights = weights_folder(policy, folder)
    try:
        require_transformer_engine()
        agree_on_model(config_json, folder, with_weights=weights is not None)
        if num_steps is None:
            policy = _without_mtp(policy)
            return MegatronModel(policy, hf_config, weights, tokenizer=tokenizer, heads=heads, store=RAY_STORE)
        trainer = MegatronTrainer(
            policy,
            hf_config,
            weights,
            num_steps,
            tokenizer=tokenizer,
            keep_reference=keep_reference,
            heads=heads,
            store=RAY_STORE,
        )
    except UserError as error:
        return error
    trainer.reports_moe_metrics = rank == 0
    return trainer
