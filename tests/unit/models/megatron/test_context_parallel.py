# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Sequences that several ranks share: the cut by hand, and whole steps that are those of one rank.

Attention over shared sequences is Transformer Engine's; here a stand-in for it in plain torch, over gloo.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_moe.distributed.batch import Destination, TokenBatch, per_token
from nemo_rl_moe.distributed.microbatches import PackedBatching
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.megatron.model.memory_estimate import worker_memory
from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config
from nemo_rl_moe.models.megatron.training.context_parallel import ContextCut, ContextPlace, zigzag_columns
from nemo_rl_moe.models.megatron.training.microbatch import MicrobatchShape, common_shape, pack_microbatch
from nemo_rl_moe.models.policy.model_workers import choose_batching
from tests.support.checkpoint_run import load_and_train, train_and_save
from tests.support.context_run import assert_as_one_rank, exported, one_rank, shared_run
from tests.support.family_models import FAMILY_MODELS
from tests.support.gloo_ranks import run_ranks_with_engine
from tests.support.quick_list import examples
from tests.support.tiny_model import layout, sharing_sequences, tiny_hf_config, tiny_policy
from tests.support.training_run import RunSettings, full_weights, train_run
from tests.unit.models.megatron.test_memory_estimate import held_by_rank, run_of
from tests.unit.models.megatron.tiny_trainers import EXPERT_BIAS, PACKED, ZERO_1

CPU = torch.device("cpu")


def test_columns_by_hand() -> None:
    # Of eight columns chunks of two, of four behind them chunks of one.
    assert zigzag_columns([8, 4], 2).tolist() == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]
    assert zigzag_columns([6], 3).tolist() == [[0, 5], [1, 4], [2, 3]]
    with pytest.raises(ValueError, match="a row or packed sequence of 6 tokens cannot be cut into 4 equal chunks"):
        zigzag_columns([8, 6], 2)


@settings(max_examples=examples(60), deadline=None)
@given(chunks=st.lists(st.integers(1, 4), min_size=1, max_size=4), num_ranks=st.integers(2, 5))
def test_ranks_hold_all_columns_once_and_as_much_work(chunks: list[int], num_ranks: int) -> None:
    segments = [2 * num_ranks * chunk for chunk in chunks]
    columns = zigzag_columns(segments, num_ranks)
    assert sorted(columns.flatten().tolist()) == list(range(sum(segments)))
    # Keys that a query sees, by its position in its sequence.
    seen = torch.cat([torch.arange(1, length + 1) for length in segments])
    assert len(set(seen[columns].sum(1).tolist())) == 1
    cuts = [ContextCut.of(segments, ContextPlace(rank, num_ranks)) for rank in range(num_ranks)]
    values = torch.rand(2, sum(segments), 3)
    parts = [cut.part(values) for cut in cuts if cut is not None]
    for cut, part in zip(cuts, parts, strict=True):
        assert cut is not None
        # What `whole` does with what it has gathered.
        assert torch.equal(torch.cat(parts, 1).index_select(1, cut.order), values)
        assert torch.equal(part, values[:, cut.local >= 0][:, cut.local[cut.local >= 0].argsort()])


def test_packed_sequences_are_cut_one_by_one() -> None:
    ids = torch.tensor([[11, 12, 13, 0, 0], [21, 22, 23, 24, 25]])
    lengths = torch.tensor([3, 5])
    tags = per_token(ids.float(), Destination.MODEL, fill=-1)
    batch = TokenBatch(ids, lengths, ids > 0, ("a", "b"), {"tags": tags})
    shapes = [common_shape([batch], MicrobatchShape(8, place=ContextPlace(rank, 2)), packed=True) for rank in range(2)]
    # Padded to 4 and 8 columns; 4 more make a multiple of 8.
    assert [(shape.columns, shape.column_multiple) for shape in shapes] == [(12, 8)] * 2
    first, second = (pack_microbatch(batch, shape, CPU) for shape in shapes)
    assert first.input_ids.tolist() == [[11, 0, 21, 22, 0, 0, 0, 0]]
    assert second.input_ids.tolist() == [[12, 13, 23, 24, 25, 0, 0, 0]]
    assert first.labels.tolist() == [[12, 0, 22, 23, 0, 0, 0, 0]]
    assert second.labels.tolist() == [[13, 0, 24, 25, 0, 0, 0, 0]]
    assert first.position_ids.tolist() == [[0, 3, 0, 1, 6, 7, 0, 3]]
    assert second.position_ids.tolist() == [[1, 2, 2, 3, 4, 5, 1, 2]]
    assert first.model_columns["tags"].tolist() == [[11, -1, 21, 22, -1, -1, -1, -1]]
    assert first.padding_mask is not None
    assert first.padding_mask.int().tolist() == [[0, 1, 0, 0, 1, 1, 1, 1]]
    for made in (first, second):
        assert made.packed_seq_params is not None
        assert made.packed_seq_params.cu_seqlens_q.tolist() == [0, 4, 12, 16]
        assert made.packed_seq_params.max_seqlen_q == 8
        assert (made.sequence_start.tolist(), made.num_columns) == ([0, 4], 16)


def test_ranks_have_a_mask_together_or_none() -> None:
    """A rank without padding beside one with some: with a mask routers enter further collectives."""
    ids = torch.ones(1, 7, dtype=torch.long)
    batch = TokenBatch(ids, torch.tensor([7]), ids > 0, ("a",))
    shapes = [MicrobatchShape(4, place=ContextPlace(rank, 2)) for rank in (0, 1)]
    masks = [pack_microbatch(batch, shape, CPU).padding_mask for shape in shapes]
    assert [None if mask is None else mask.sum().item() for mask in masks] == [1, 0]


def test_packed_sequences_fit_with_their_padding() -> None:
    packing = "{enabled: true, train_mb_tokens: 64, train_mb_patches: null}"
    policy = sharing_sequences(tiny_policy(sequence_packing=packing), 2)
    assert choose_batching(policy, 1) == PackedBatching(64, sequence_multiple=4)


def test_attention_that_ranks_cannot_share_is_refused() -> None:
    shared = sharing_sequences(tiny_policy(model_overrides="{cp_comm_type: a2a}"), 2)
    with pytest.raises(ConfigurationError) as caught:
        build_transformer_config(shared, FAMILY_MODELS["gpt_oss"].hf_config())
    key = "policy.megatron_cfg"
    assert caught.value.problems == [
        f"{key}.context_parallel_size: got 2, expected 1: ranks cannot share sequences of a model with attention"
        " windows and sinks",
        f"{key}.model_overrides.cp_comm_type: got 'a2a', expected 'p2p' with {key}.context_parallel_size 2",
    ]


RECOMPUTED = {"activation_checkpointing": "full"}
# Interleaved stages exchange wrongly over gloo where they batch their messages, with one rank a sequence too.
INTERLEAVED = {"model_overrides": "{batch_p2p_comm: false}"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "context", "changes"),
    [
        pytest.param(2, 2, PACKED | ZERO_1, id="packed"),
        pytest.param(2, 2, layout(ep=2), id="ep2"),
        pytest.param(2, 2, {}, id="padded"),
        pytest.param(4, 4, {}, id="cp4"),
        pytest.param(4, 4, PACKED | ZERO_1, id="cp4_packed"),
        pytest.param(4, 2, layout(tp=2) | ZERO_1, id="tp2"),
        pytest.param(4, 2, layout(tp=2) | PACKED | RECOMPUTED, id="tp2_packed"),
        pytest.param(4, 2, layout(tp=2, ep=2), id="tp2_ep2"),
        pytest.param(4, 2, layout(pp=2) | ZERO_1, id="pp2"),
        pytest.param(4, 2, layout(pp=2) | PACKED | RECOMPUTED, id="pp2_packed"),
        pytest.param(4, 2, layout(pp=2, vpp=2) | PACKED | INTERLEAVED, id="pp2_vpp2_packed"),
        pytest.param(4, 2, layout(ep=4) | PACKED | ZERO_1, id="dp2_ep4_packed"),
        pytest.param(2, 2, {"logprob_chunk_size": 16}, id="logits_in_chunks"),
    ],
)
def test_ranks_that_share_sequences_train_as_one_does(world_size: int, context: int, changes: dict[str, Any]) -> None:
    assert_as_one_rank(shared_run(world_size, context, **changes), one_rank())


BALANCING = {
    "sequences": {"moe_router_load_balancing_type": "seq_aux_loss"},
    "global_batch": {"moe_router_load_balancing_type": "global_aux_loss"},
    "bias": EXPERT_BIAS,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BALANCING)
@pytest.mark.parametrize("packed", [False, True])
def test_balancing_sees_whole_sequences(name: str, packed: bool) -> None:
    changes = BALANCING[name] | {"sequence_packing__enabled": packed}
    assert_as_one_rank(shared_run(2, 2, capture=False, **changes), shared_run(1, capture=False, **changes)[0])


@pytest.mark.slow
def test_z_loss_of_ranks_with_unequal_padding() -> None:
    changes: Any = {"moe_z_loss_coeff": 1e-2, "lengths": {"shortest": 3, "longest": 16}, "capture": False}
    assert_as_one_rank(shared_run(2, 2, **changes), shared_run(1, **changes)[0])


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "resumed"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("zero_1", [True, False])
def test_checkpoints_go_from_shared_sequences_to_others(saved: int, resumed: int, zero_1: bool, tmp_path: Path) -> None:
    changes = {"distributed_data_parallel_config__use_distributed_optimizer": zero_1}

    def settings_of(context: int) -> RunSettings:
        return RunSettings(sharing_sequences(tiny_policy(2, **changes), context))

    written = run_ranks_with_engine(train_and_save, 2, settings_of(saved), str(tmp_path), 1, 3)[0]
    (found, _) = run_ranks_with_engine(load_and_train, 2, settings_of(resumed), str(tmp_path), 1, 3)
    for step, expected in zip(found, written[1:], strict=True):
        assert step["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)


@pytest.mark.slow
def test_exported_weights_are_those_of_one_rank(tmp_path: Path) -> None:
    shared = sharing_sequences(tiny_policy(4, **layout(tp=2, ep=2)), 2)
    found = run_ranks_with_engine(exported, 4, shared, str(tmp_path / "four"))[0]
    (expected,) = run_ranks_with_engine(exported, 1, tiny_policy(), str(tmp_path / "one"))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "olmoe", "qwen2_moe", "deepseek_v2", "deepseek_v3"])
def test_families_train_as_on_one_rank(family: str, packed: bool) -> None:
    policies = {n: sharing_sequences(tiny_policy(n, sequence_packing__enabled=packed), n) for n in (1, 2)}
    (expected,) = run_ranks_with_engine(train_run, 1, RunSettings(policies[1], family))
    runs = run_ranks_with_engine(train_run, 2, RunSettings(policies[2], family))
    assert runs[0].losses == pytest.approx(expected.losses, rel=1e-6)
    assert runs[0].grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)
    weights, wanted = full_weights(runs), full_weights([expected])
    for name, values in wanted.items():
        np.testing.assert_allclose(weights[name], values, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_ranks_hold_what_the_arithmetic_says() -> None:
    """Optimizer state is dealt out to all ranks that have the same weights."""
    config = run_of(2, precision="bfloat16", **ZERO_1)
    config = config.model_copy(update={"policy": sharing_sequences(config.policy, 2)})
    ranks = run_ranks_with_engine(held_by_rank, 2, config, {})
    hf_config = tiny_hf_config()
    transformer = build_transformer_config(tiny_policy(2, precision="bfloat16"), hf_config)
    estimate = worker_memory(config, transformer, hf_config, 0)
    for held in ranks:
        assert held.gradients == estimate.gradients
    held_state = sum(held.optimizer_state for held in ranks)
    assert held_state <= 2 * estimate.optimizer.state <= held_state + 2 * 12 * 2
