# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Each place where Megatron-Core goes wrong, often without a word: with this project's cure, and with it taken away."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import GlobalBatchShard, TokenBatch, make_shard
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.megatron.model import releases as corrections
from nemo_rl_moe.models.megatron.model import transformer_config
from nemo_rl_moe.models.megatron.model.model_overrides import read_overrides
from nemo_rl_moe.models.megatron.model.releases import MEGATRON_VERSION, recorded_auxiliary_losses
from nemo_rl_moe.models.megatron.moe_metrics import get_moe_metrics
from tests.support.gloo_ranks import RankError, run_ranks
from tests.support.quick_list import full, slow
from tests.support.tiny_model import layout, parallel_job, tiny_batch, tiny_hf_config, tiny_policy
from tests.support.training_run import (
    RankRun,
    RunSettings,
    build_trainer,
    difference,
    record_auxiliary_loss,
    shard_of_step,
    tiny_trainer,
    train_run,
)

_ROOM = "nemo_rl_moe.models.megatron."
_OLD = MEGATRON_VERSION == "0.16.1"


def _communicate_in_batches(policy: Any) -> dict[str, Any]:
    return _IMPLEMENTATION_FIELDS(policy) | {"batch_p2p_comm": True}


_IMPLEMENTATION_FIELDS: Callable[..., dict[str, Any]] = transformer_config._implementation_fields


def _mark_only(**marks: bool) -> Callable[[torch.nn.Module], None]:
    """`mark_expert_parameters` with fewer marks: what others did not set stays as it is."""

    def mark(chunk: torch.nn.Module) -> None:
        for name, parameter in chunk.named_parameters():
            if corrections.is_routed_expert(name):
                for mark_name, value in marks.items():
                    setattr(parameter, mark_name, value)

    return mark


# Cure to what takes its place when a test runs without it.
_WITHOUT: dict[str, dict[str, Any]] = {
    "expert_marks": {"model.gpt_model.mark_expert_parameters": lambda chunk: None},
    "no_sequence_parallel_experts": {"model.gpt_model.mark_expert_parameters": _mark_only(allreduce=False)},
    "expert_biases_in_norm": {
        "model.gpt_model.mark_expert_parameters": _mark_only(allreduce=False, sequence_parallel=False)
    },
    "sink_marks": {"model.gpt_model.mark_attention_sinks": lambda chunk: None},
    "plain_p2p": {"model.transformer_config._implementation_fields": _communicate_in_batches},
    "expert_bias": {"model.gpt_model.correct_expert_bias_with_padding": lambda: None},
    "stage_mask": {"training.forward_backward.padding_mask_for_stage": lambda mask, **_: mask},
    "decay_groups": {"training.optimizer.get_standard_config_overrides": lambda config: {}},
}


@contextmanager
def without(cure: str | None) -> Iterator[None]:
    """Takes a cure away."""
    with ExitStack() as stack:
        for name, replacement in _WITHOUT.get(cure or "", {}).items():
            stack.enter_context(mock.patch(_ROOM + name, replacement))
        yield


def train_without(cure: str | None, settings: RunSettings) -> RankRun:
    with without(cure):
        return train_run(settings)


def both_ways(cure: str, world_size: int, settings: RunSettings) -> tuple[list[RankRun], list[RankRun]]:
    """The run with the cure and the run without it."""
    return run_ranks(train_without, world_size, None, settings), run_ranks(train_without, world_size, cure, settings)


@cache
def single_rank() -> RankRun:
    """The tiny model; its weights and losses are compared with, and made once."""
    return run_ranks(train_run, 1, RunSettings(tiny_policy(1, layer_spec="local")))[0]


# Expert gradients under tensor parallelism


@pytest.mark.full
def test_expert_gradients_are_reduced_when_experts_are_not_cut_but_matrices_are() -> None:
    settings = RunSettings(tiny_policy(2, layer_spec="local", **layout(tp=2)))
    cured, uncured = both_ways("expert_marks", 2, settings)
    reference = single_rank()
    assert difference(cured, reference).weights < 5e-6
    if _OLD:
        with pytest.raises(AssertionError, match=r"replicas of .*experts"):
            difference(uncured, reference)
        assert abs(uncured[0].grad_norms[0] / reference.grad_norms[0] - 1) > 5e-5
    else:
        assert difference(uncured, reference).weights < 5e-6


def test_routed_experts_are_distinguished_from_everything_else() -> None:
    assert corrections.is_routed_expert("decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight")
    assert corrections.is_routed_expert("mlp.experts.linear_fc1_weights")
    assert not corrections.is_routed_expert("decoder.layers.0.mlp.shared_experts.linear_fc1.weight")
    assert not corrections.is_routed_expert("decoder.layers.0.mlp.router.weight")


# Biases of experts, and sinks, under tensor parallelism


@pytest.fixture(scope="module")
def one_rank_with_biases() -> RankRun:
    return run_ranks(train_run, 1, RunSettings(tiny_policy(1), "gpt_oss"))[0]


@cache
def with_biases(cure: str | None, **sizes: int) -> list[RankRun]:
    """Two ranks without one of the cures or, for None, with all of them."""
    return run_ranks(train_without, 2, cure, RunSettings(tiny_policy(2, **layout(**sizes)), "gpt_oss"))


@pytest.mark.full
@pytest.mark.parametrize("sizes", [{"tp": 2}, slow({"tp": 2, "ep": 2})], ids=["tp2", "tp2_ep2"])
def test_biases_of_experts_are_not_added_up_over_tensor_parallel_ranks(
    sizes: dict[str, int], one_rank_with_biases: RankRun
) -> None:
    assert difference(with_biases(None, **sizes), one_rank_with_biases).weights < 5e-6
    uncured = with_biases("no_sequence_parallel_experts", **sizes)
    assert _first_norm_off(uncured, one_rank_with_biases) > 1e-3


def _first_norm_off(runs: Sequence[RankRun], reference: RankRun) -> float:
    return max(abs(run.grad_norms[0] / reference.grad_norms[0] - 1) for run in runs)


@pytest.mark.full
def test_biases_of_experts_count_in_every_rank_s_gradient_norm(one_rank_with_biases: RankRun) -> None:
    off = _first_norm_off(with_biases("expert_biases_in_norm", tp=2, ep=2), one_rank_with_biases)
    assert off > 1e-4 if _OLD else off < 2e-6


@pytest.mark.full
def test_sinks_belong_to_the_heads_of_a_rank(one_rank_with_biases: RankRun) -> None:
    assert difference(with_biases(None, tp=2), one_rank_with_biases).weights < 5e-6
    with pytest.raises(AssertionError, match=r"replicas of .*softmax_offset"):
        difference(with_biases("sink_marks", tp=2), one_rank_with_biases)


# Interleaved pipeline


@pytest.mark.full
def test_batched_point_to_point_communication_gives_another_loss_under_gloo() -> None:
    settings = RunSettings(tiny_policy(2, layer_spec="local", **layout(pp=2, vpp=2)), num_steps=1)
    cured, uncured = both_ways("plain_p2p", 2, settings)
    expected = single_rank().losses[0]
    assert cured[0].losses[0] == pytest.approx(expected, rel=1e-6)
    assert abs(uncured[0].losses[0] - expected) > 1e-3


# Padding


@pytest.mark.full
def test_padding_mask_reaches_later_stages_under_sequence_parallelism() -> None:
    settings = RunSettings(tiny_policy(4, layer_spec="local", **layout(pp=2, tp=2)), num_steps=1)
    with pytest.raises(RankError, match="size of tensor"):
        run_ranks(train_without, 4, "stage_mask", settings)


@pytest.mark.parametrize(
    ("is_first_stage", "tensor_size", "expected"),
    [(True, 2, [[0, 0, 0, 1]]), (False, 1, [[0, 0, 0, 1]]), (False, 2, [[0, 1]])],
)
def test_each_stage_gets_its_part_of_the_mask(
    is_first_stage: bool, tensor_size: int, expected: list[list[int]]
) -> None:
    mask = torch.tensor([[False, False, False, True]])
    part = corrections.padding_mask_for_stage(
        mask, is_first_stage=is_first_stage, tensor_rank=tensor_size - 1, tensor_size=tensor_size
    )
    assert part is not None
    assert part.int().tolist() == expected
    assert part.is_contiguous()


def widened(shard: GlobalBatchShard, columns: int) -> GlobalBatchShard:
    """Return the same sequences with more padding behind them, and tokens in it that must not matter."""
    wider = []
    for batch in shard.microbatches:
        ids = torch.full((len(batch), columns), 63)
        ids[:, : batch.input_ids.shape[1]] = batch.input_ids
        mask = torch.zeros(len(batch), columns, dtype=torch.bool)
        mask[:, : batch.token_mask.shape[1]] = batch.token_mask
        wider.append(TokenBatch(ids, batch.lengths, mask, batch.sample_ids))
    return replace(shard, microbatches=tuple(wider))


def train_with_more_padding(settings: RunSettings, columns: int) -> tuple[float, dict[str, float]]:
    with tiny_trainer(settings.policy, settings.model) as trainer:
        shard = shard_of_step(trainer, settings, 0)
        result = trainer.train([widened(shard, columns)], sft_loss)
        losses = {name: value for name, value in result.moe_metrics.items() if name.startswith(("load_bal", "z_loss"))}
        return result.grad_norm, losses


@pytest.mark.parametrize(
    "changes", [full({"layer_spec": "local"}), slow({"layer_spec": "auto"}), {"moe_z_loss_coeff": 0.1}]
)
def test_padding_changes_neither_auxiliary_losses_nor_gradients(changes: dict[str, Any]) -> None:
    settings = RunSettings(tiny_policy(1, moe_router_load_balancing_type="aux_loss", **changes))
    ((norm, metrics),) = run_ranks(train_with_more_padding, 1, settings, 17)
    ((wide_norm, wide_metrics),) = run_ranks(train_with_more_padding, 1, settings, 40)
    assert wide_norm == pytest.approx(norm, rel=1e-6)
    assert wide_metrics == pytest.approx(metrics, rel=1e-6)


# Expert bias


def _expert_bias_settings(world_size: int) -> RunSettings:
    policy = tiny_policy(
        world_size,
        layer_spec="local",
        moe_router_enable_expert_bias=True,
        moe_router_score_function="sigmoid",
        moe_router_bias_update_rate=0.01,
    )
    return RunSettings(policy)


@pytest.mark.full
def test_expert_bias_works_with_padding() -> None:
    (reference,) = run_ranks(train_without, 1, None, _expert_bias_settings(1))
    cured = run_ranks(train_without, 2, None, _expert_bias_settings(2))
    assert difference(cured, reference).weights < 5e-6
    with pytest.raises(RankError, match="size of tensor"):
        run_ranks(train_without, 1, "expert_bias", _expert_bias_settings(1))


def test_expert_bias_leaves_padding_out_of_its_counts() -> None:
    router = SimpleNamespace(enable_expert_bias=True, local_tokens_per_expert=torch.tensor([5.0, 0.0, 1.0]))
    routing_map = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 1]], dtype=torch.bool)
    corrections._count_tokens_for_expert_bias(router, routing_map, torch.tensor([False, False, True]))
    assert router.local_tokens_per_expert.tolist() == [6.0, 2.0, 2.0]
    corrections._count_tokens_for_expert_bias(router, routing_map)
    assert router.local_tokens_per_expert.tolist() == [8.0, 4.0, 4.0]
    with torch.no_grad():
        corrections._count_tokens_for_expert_bias(router, routing_map)
    assert router.local_tokens_per_expert.tolist() == [8.0, 4.0, 4.0]


# Weight decay


@pytest.mark.full
def test_weight_decay_acts_on_matrices_only() -> None:
    def weights(cure: str | None, decay: float) -> dict[str, np.ndarray[Any, Any]]:
        policy = tiny_policy(1, layer_spec="local", optimizer__weight_decay=decay)
        (run,) = run_ranks(train_without, 1, cure, RunSettings(policy, num_steps=1))
        return {name: values for (name, _), values in run.pieces.items()}

    plain, decayed, all_decayed = weights(None, 0.0), weights(None, 0.5), weights("decay_groups", 0.5)
    norms = [name for name in plain if name.endswith("layernorm.weight")]
    matrices = plain.keys() - set(norms)
    assert len(norms) == 17
    for name in norms:
        np.testing.assert_array_equal(decayed[name], plain[name])
        assert np.abs(all_decayed[name] - plain[name]).max() > 1e-4
    for name in matrices:
        assert np.abs(decayed[name] - plain[name]).max() > 1e-5, name


# Metrics of the loss


def losses_reported(policy: PolicyConfig) -> tuple[float, float]:
    with parallel_job(policy):
        settings = RunSettings(policy)
        trainer = build_trainer(settings.policy, settings.model)
        shard = shard_of_step(trainer, settings, 0)
        evaluated = trainer.evaluate(shard, sft_loss)["loss"].reduce()
        return evaluated, trainer.train([shard], sft_loss).global_loss


def test_logged_loss_is_not_divided_by_the_schedule() -> None:
    # The schedule divides the loss that it is given in place: four microbatches would show a quarter.
    ((evaluated, trained),) = run_ranks(losses_reported, 1, tiny_policy(1, layer_spec="local"))
    assert trained == pytest.approx(evaluated, rel=1e-6)


# Auxiliary losses over ranks


def reduce_what_was_recorded(policy: PolicyConfig, fill: bool) -> dict[str, float]:
    config = transformer_config.build_transformer_config(policy, tiny_hf_config(mlp_only_layers=[0, 1]))
    with parallel_job(policy) as rank:
        if rank == 1:
            record_auxiliary_loss("load_balancing_loss", torch.tensor(1.5), 3, 4)
        if fill:
            return get_moe_metrics(1.0, config=config, device=torch.device("cpu"))
        # What Megatron-Core does without `force_initialize`: each rank reduces the names that it has.
        for values in recorded_auxiliary_losses().values():
            dist.all_reduce(values)
        return {}


def test_stage_that_recorded_nothing_takes_part_in_the_reduction() -> None:
    policy = tiny_policy(2, layer_spec="local", **layout(pp=2))
    assert run_ranks(reduce_what_was_recorded, 2, policy, True) == [{"load_balancing_loss": 0.75}] * 2
    with pytest.raises(RankError, match="all_reduce"):
        run_ranks(reduce_what_was_recorded, 2, policy, False, timeout_s=10.0)


# Scale of the auxiliary losses


def train_repeated(policy: PolicyConfig, repetitions: int, scaled: bool) -> float:
    """Gradient norm of a batch whose microbatches all hold the same two sequences."""
    with tiny_trainer(policy) as trainer, ExitStack() as stack:
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        if not scaled:
            stack.enter_context(mock.patch.object(MoEAuxLossAutoScaler, "set_loss_scale"))
        pair = tiny_batch(100).select([0, 1])
        batch = pair.select([0, 1] * repetitions)
        microbatches = [[2 * index, 2 * index + 1] for index in range(repetitions)]
        return trainer.train([make_shard(batch, microbatches, batch)], sft_loss).grad_norm


@pytest.mark.full
def test_auxiliary_gradients_do_not_grow_with_the_number_of_microbatches() -> None:
    policy = tiny_policy(1, layer_spec="local", moe_aux_loss_coeff=1.0, max_grad_norm=None)
    once, four_times = (run_ranks(train_repeated, 1, policy, count, True)[0] for count in (1, 4))
    assert four_times == pytest.approx(once, rel=1e-6)
    unscaled = run_ranks(train_repeated, 1, policy, 4, False)[0]
    assert abs(unscaled / once - 1) > 0.05


def train_in_microbatches_of(size: int, policy: PolicyConfig) -> float:
    """Gradient norm of one sequence four times, in microbatches of `size`."""
    with tiny_trainer(policy) as trainer:
        batch = tiny_batch(100).select([0] * 4)
        microbatches = [list(range(first, first + size)) for first in range(0, 4, size)]
        return trainer.train([make_shard(batch, microbatches, batch)], sft_loss).grad_norm


def test_the_sequence_level_loss_weighs_the_same_in_microbatches_of_any_size() -> None:
    kind = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1.0}
    policy = tiny_policy(1, layer_spec="local", max_grad_norm=None, **kind)
    single, whole = (run_ranks(train_in_microbatches_of, 1, size, policy)[0] for size in (1, 4))
    assert whole == pytest.approx(single, rel=1e-6)
    with pytest.raises(ConfigurationError, match="calculate_per_token_loss"):
        read_overrides({"calculate_per_token_loss": True}, ())
