# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The names of a model's tensors in a checkpoint, which are the same whatever modules the model is made of.

Transformer Engine keeps the weight of a norm in the linear layer behind it, but not in front of experts.
Megatron-Core's own modules keep it apart; their layer specs name it as Transformer Engine does for a dense layer, in
front of experts too, but not beside multi-latent attention. Here a norm has the name of a module of its own everywhere.
"""

from collections.abc import Iterable
from pathlib import Path

from nemo_rl_moe.errors import CheckpointError
from nemo_rl_moe.models.megatron.agreement import union_of_ranks
from nemo_rl_moe.models.megatron.parameter_layout import plain_norm_name
from nemo_rl_moe.models.safetensors_folder import listed

COUNTERS_KEY = "trainer.counters"
RANDOM_PREFIX = "random."
_NOT_THE_MODEL_S = ("optimizer.", "trainer.", RANDOM_PREFIX)
_EXPERT_BIAS = ".router.expert_bias"


def model_names(saved: Iterable[str]) -> dict[str, str]:
    """The model's tensors among those of a checkpoint: the name that this project gives each, to the one it has there.

    Checkpoints that keep Megatron-Core's own names are read with it.
    """
    return {plain_norm_name(name): name for name in saved if _is_the_model_s(name)}


def may_keep_zeros(name: str) -> bool:
    """True for what a router adds to its scores when it chooses: a model that has learnt none begins with zeros."""
    return name.endswith(_EXPERT_BIAS)


def check_names(directory: Path, wanted: Iterable[str], saved: Iterable[str]) -> None:
    """Compares what the ranks ask a checkpoint for with what it has of a model. Every rank calls it.

    Args:
        directory: The checkpoint, for the message.
        wanted: Names in the checkpoint that this rank asks for.
        saved: All of the checkpoint's names.

    Raises:
        CheckpointError: A tensor is missing, or no rank has a place for one; the same on every rank.
    """
    asked_for = union_of_ranks(dict.fromkeys(wanted)).keys()
    held = {name for name in saved if _is_the_model_s(name)}
    problems = []
    if missing := sorted(asked_for - held):
        problems.append(f"lacks tensors of the model ({len(missing)}): {listed(missing)}")
    if extra := sorted(held - asked_for):
        problems.append(f"holds tensors that the model has no place for ({len(extra)}): {listed(extra)}")
    if problems:
        raise CheckpointError(
            f"{directory}: {'; '.join(problems)}; config.json and policy.megatron_cfg must describe the model that was "
            "saved"
        )


def _is_the_model_s(name: str) -> bool:
    return not name.startswith(_NOT_THE_MODEL_S)
