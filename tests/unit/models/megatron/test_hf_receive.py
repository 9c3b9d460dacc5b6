# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights out of a stream of Hugging Face tensors: all of them arrive to the bit, in every layout, or an error says
what did not."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.errors import WeightSyncError
from nemo_rl_moe.models.megatron.training.megatron_model import MegatronModel
from nemo_rl_moe.models.megatron.weights.hf_export import tensors_of_this_rank
from nemo_rl_moe.models.megatron.weights.hf_receive import load_tensors
from nemo_rl_moe.models.megatron.weights.parameter_layout import parameter_pieces
from nemo_rl_moe.weight_sync.transport import NamedTensor
from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import full
from tests.support.tiny_model import layout, parallel_job, tiny_policy
from tests.support.training_run import hf_config_of

Tensors = dict[str, Tensor]


def trained_model(policy: PolicyConfig, name: Mapping[str, Any] | str) -> MegatronModel:
    """Return this rank's model; no two of its numbers are alike, biases and norms included."""
    model = MegatronModel(policy, hf_config_of(name), None)
    pieces = list(parameter_pieces(model.chunks, model.config))
    with torch.no_grad():
        for number, piece in enumerate(pieces):
            generator = torch.Generator().manual_seed(number)
            piece.local.add_(torch.randn(piece.local.shape, generator=generator).to(piece.local.dtype))
            if piece.is_vocabulary:
                num_real = model.hf_config.vocab_size - piece.shard_rank * len(piece.local)
                piece.local[max(0, num_real) :] = 0.0
    return model


def exported(model: MegatronModel) -> Tensors:
    """Return all tensors as all ranks together hand them out."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, dict(tensors_of_this_rank(model.chunks, model.config, model.hf_config)))
    return {name: tensor for of_rank in found for name, tensor in of_rank.items()}


def passing(tensors: Tensors) -> Iterator[NamedTensor]:
    """Yield tensors the last first; each is gone when the next one is taken, as a transport's are."""
    for name in reversed(tensors):
        tensor = tensors[name].clone()
        yield name, tensor
        tensor.fill_(float("nan"))


def lost_after_a_transfer(policy: PolicyConfig, name: Mapping[str, Any] | str) -> tuple[int, list[str]]:
    """Return the number of tensors that travelled, and the parameters and buffers that are not what they were."""
    with parallel_job(policy):
        model = trained_model(policy, name)
        tensors = exported(model)
        pieces = list(parameter_pieces(model.chunks, model.config))
        before = [piece.local.clone() for piece in pieces]
        for piece in pieces:
            piece.local.fill_(7.0)
        load_tensors(model.chunks, model.config, model.hf_config, passing(tensors))
        changed = [piece.name for piece, old in zip(pieces, before, strict=True) if not torch.equal(piece.local, old)]
        return len(tensors), changed


MODELS = {
    "qwen3_moe": {},
    "odd vocabulary, tied": {"vocab_size": 61, "tie_word_embeddings": True},
    "gpt_oss": "gpt_oss",
    "deepseek_v3": "deepseek_v3",
    "qwen2_moe": "qwen2_moe_dense_layers_normalized_weights",
    # A bias that files have on the block, and indexers: buffers both.
    "minimax_m2": "minimax_m2",
    "glm_moe_dsa": "glm_moe_dsa",
}


@pytest.mark.parametrize("model", [*list(MODELS)[:4], *(full(each) for each in list(MODELS)[4:])])
def test_every_parameter_of_a_whole_model_arrives(model: str) -> None:
    ((num_tensors, changed),) = run_ranks(lost_after_a_transfer, 1, tiny_policy(1), MODELS[model])
    assert num_tensors > 10
    assert not changed


@pytest.mark.parametrize("sizes", [{"tp": 2}, full({"ep": 2}), full({"pp": 2})])
def test_each_rank_takes_its_slices(sizes: dict[str, int]) -> None:
    for _, changed in run_ranks(lost_after_a_transfer, 2, tiny_policy(2, **layout(**sizes)), {"vocab_size": 61}):
        assert not changed


def without(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name}


def with_a_shorter_norm(tensors: Tensors) -> Tensors:
    return {**tensors, "model.norm.weight": tensors["model.norm.weight"][:-1]}


FAULTS: Mapping[str, tuple[Mapping[str, Any] | str, Callable[[Tensors], Tensors], str]] = {
    "missing": (
        {},
        without("experts.3.down"),
        "tensors have not arrived: model.layers.0.mlp.experts.3.down_proj.weight, model.layers.1.mlp.experts.3",
    ),
    "a bias that is no parameter": (
        "minimax_m2",
        without("e_score_correction_bias"),
        "4 tensors have not arrived: model.layers.0.block_sparse_moe.e_score_correction_bias, ",
    ),
    "another shape": ({}, with_a_shorter_norm, "model.norm.weight has the shape [31], expected [32]"),
}


def problems_of_faults(policy: PolicyConfig) -> dict[str, str]:
    with parallel_job(policy):
        found = {}
        for fault, (name, spoil, _) in FAULTS.items():
            model = trained_model(policy, name)
            tensors = exported(model)
            with pytest.raises(WeightSyncError) as error:
                load_tensors(model.chunks, model.config, model.hf_config, passing(spoil(tensors)))
            found[fault] = str(error.value)
        return found


def test_what_does_not_arrive_is_named() -> None:
    (found,) = run_ranks(problems_of_faults, 1, tiny_policy(1))
    for fault, (_, _, words) in FAULTS.items():
        assert words in found[fault]
