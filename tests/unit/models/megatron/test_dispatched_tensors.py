# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""After a pass, token dispatchers keep no tensors of its tokens, and no graph of a layer that was computed again."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.models.megatron.training.measurements import token_score_norms, top_candidates
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import full
from tests.support.tiny_model import layout, parallel_job, shard_of_rank, tiny_batch, tiny_policy
from tests.support.training_run import build_trainer

PASSES: dict[str, Callable[[MegatronTrainer, Any], object]] = {
    "train": lambda trainer, shard: trainer.train([shard], sft_loss),
    "evaluate": lambda trainer, shard: trainer.evaluate(shard, sft_loss),
    "logprobs": lambda trainer, shard: trainer.logprobs(shard.microbatches),
    "score_norms": lambda trainer, shard: trainer.measure(shard.microbatches, token_score_norms),
    "top_candidates": lambda trainer, shard: trainer.measure(
        shard.microbatches, partial(top_candidates, k=3, vocabulary_size=61)
    ),
}


def kept_tensors(trainer: MegatronTrainer) -> dict[str, int]:
    """Return attribute -> elements of the tensors that dispatchers keep, other than counts of experts and ranks."""
    found = {}
    for chunk in trainer.chunks:
        for module in chunk.modules():
            dispatcher = getattr(module, "token_dispatcher", None)
            for owner in (dispatcher, getattr(dispatcher, "_comm_manager", None)):
                for name, value in vars(owner).items() if owner is not None else ():
                    if isinstance(value, Tensor) and value.numel() > trainer.config.num_moe_experts:
                        found[f"{type(owner).__name__}.{name}"] = value.numel()
    return found


def kept_after_passes(policy: PolicyConfig) -> dict[str, dict[str, int]]:
    with parallel_job(policy):
        trainer = build_trainer(policy)
        shard = shard_of_rank(tiny_batch(1))
        found = {}
        for name, run in PASSES.items():
            run(trainer, shard)
            found[name] = kept_tensors(trainer)
        return found


@pytest.mark.parametrize("changes", [layout(ep=2), full(layout(ep=2) | {"moe_token_dispatcher_type": "allgather"})])
def test_no_tensor_of_tokens_is_kept(changes: dict[str, Any]) -> None:
    for found in run_ranks(kept_after_passes, 2, tiny_policy(2, **changes)):
        assert found == {name: {} for name in PASSES}


def inputs_kept_by_recomputations(policy: PolicyConfig) -> list[list[bool]]:
    """Return, whenever a layer is computed again, whether the inputs of those before are still there."""
    with parallel_job(policy):
        trainer = build_trainer(policy)
        inputs: list[weakref.ref[Tensor]] = []
        found = []

        def note(layer: nn.Module, args: Any, options: dict[str, Any]) -> None:
            if torch.is_grad_enabled():
                found.append([each() is not None for each in inputs])
                inputs.append(weakref.ref(options["hidden_states"] if "hidden_states" in options else args[0]))

        for layer in trainer.chunks[0].decoder.layers:
            layer.register_forward_pre_hook(note, with_kwargs=True)
        trainer.train([shard_of_rank(tiny_batch(1))], sft_loss)
        return found


def test_a_recomputed_layer_s_inputs_are_freed_before_the_next() -> None:
    policy = tiny_policy(2, activation_checkpointing="full", **layout(ep=2))
    for found in run_ranks(inputs_kept_by_recomputations, 2, policy):
        assert len(found) > 1
        assert not any(map(any, found))
