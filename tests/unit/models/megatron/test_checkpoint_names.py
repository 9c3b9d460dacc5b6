# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint fits a model of whatever modules, and one that does not fit is refused by name."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.transformer_layer import TransformerLayer

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.models.megatron.checkpoint import contents
from nemo_rl_moe.models.megatron.checkpoint.index import check_folder
from tests.support.checkpoint_run import load_weights_alone, problems_of_loading, save_once
from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import full
from tests.support.tiny_model import layout, tiny_policy
from tests.support.training_run import RunSettings, shard_of_step, tiny_trainer

# isort: split


def _names_in_transformer_engine(layer: TransformerLayer) -> dict[str, str]:
    """Return the norms of a layer that are no modules of their own in `get_gpt_layer_with_transformer_engine_spec`."""
    names = {}
    if isinstance(layer.self_attention, MultiLatentAttention):
        names["self_attention.q_layernorm.weight"] = "self_attention.linear_q_up_proj.layer_norm_weight"
        names["self_attention.kv_layernorm.weight"] = "self_attention.linear_kv_up_proj.layer_norm_weight"
    else:
        names["input_layernorm.weight"] = "self_attention.linear_qkv.layer_norm_weight"
    if not layer.is_moe_layer:
        names["pre_mlp_layernorm.weight"] = "mlp.linear_fc1.layer_norm_weight"
    return names


@contextmanager
def _of_transformer_engine() -> Iterator[None]:
    original = TransformerLayer.sharded_state_dict

    def renamed(self: TransformerLayer, prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
        found: dict[str, Any] = original(self, prefix, *args, **kwargs)
        fused = _names_in_transformer_engine(self)
        for name, sharded in found.items():
            inner = name.removeprefix(prefix)
            if "layernorm." in inner:  # where the layer spec has given it another name, too
                sharded.key = prefix + fused.get(inner, inner)
        return found

    with patch.object(TransformerLayer, "sharded_state_dict", renamed):
        yield


def save_under_each_name(
    settings: RunSettings, folder: str
) -> tuple[dict[str, set[str]], dict[str, tuple[float, ...]]]:
    """Save the same state four times: with own modules or those of Transformer Engine, and unchanged or not.

    Returns:
        For each way, the names of norms in the checkpoint, and the next step's loss and gradient norm after loading it
        into own modules; those of the run that goes on are under "".
    """
    names, steps = {}, {}
    with tiny_trainer(settings.policy, settings.model) as trainer:

        def train(step: int) -> tuple[float, ...]:
            result = trainer.train([shard_of_step(trainer, settings, step)], sft_loss)
            return result.global_loss, result.grad_norm

        train(0)
        for way in ("own", "own, unchanged", "engine", "engine, unchanged"):
            directory = Path(folder) / way
            directory.mkdir()
            with ExitStack() as stack:
                if "engine" in way:
                    stack.enter_context(_of_transformer_engine())
                if "unchanged" in way:
                    stack.enter_context(patch.object(contents, "plain_norm_name", lambda name: name))
                trainer.start_checkpoint(directory, with_optimizer=True)
                assert trainer.finish_checkpoint() is None
            index, _ = check_folder(directory)
            names[way] = {name for name in index.state_dict_metadata if "norm" in name}
        train(1)
        steps[""] = train(2)
        for way in names:
            trainer.load_checkpoint(Path(folder) / way, with_optimizer=True)
            train(1)
            steps[way] = train(2)
    return names, steps


DENSE_LAYER, MOE_LAYER = "decoder.layers.0.", "decoder.layers.1."


@pytest.mark.parametrize(
    ("settings", "own", "engine"),
    [
        (
            RunSettings(tiny_policy(), model={"mlp_only_layers": [0]}),
            {"mlp.linear_fc1.layer_norm_weight", "self_attention.linear_qkv.layer_norm_weight"},
            {"pre_mlp_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"},
        ),
        full(
            RunSettings(tiny_policy(), model="deepseek_v3"),
            {"pre_mlp_layernorm.weight", "self_attention.kv_layernorm.weight"},
            {"pre_mlp_layernorm.weight", "self_attention.linear_kv_up_proj.layer_norm_weight"},
        ),
    ],
    ids=["experts", "latent attention"],
)
def test_norms_have_one_name_and_are_found_under_others(
    settings: RunSettings, own: set[str], engine: set[str], tmp_path: Path
) -> None:
    ((names, steps),) = run_ranks(save_under_each_name, 1, settings, str(tmp_path))
    assert names["own"] == names["engine"]
    assert {MOE_LAYER + "pre_mlp_layernorm.weight", DENSE_LAYER + "input_layernorm.weight"} <= names["own"]
    assert not any("layer_norm_weight" in name for name in names["own"])
    assert {MOE_LAYER + name for name in own} <= names["own, unchanged"]
    assert {MOE_LAYER + name for name in engine} <= names["engine, unchanged"]
    assert DENSE_LAYER + "mlp.linear_fc1.layer_norm_weight" in names["engine, unchanged"]
    moments = {f"optimizer.state.exp_avg.{MOE_LAYER}{name}" for name in engine}
    assert moments <= names["engine, unchanged"]
    assert all(step == steps[""] for step in steps.values()), steps


SHARED_EXPERTS: dict[str, Any] = {"moe_shared_expert_intermediate_size": 64}
EXPERT_BIAS: dict[str, Any] = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}


def saved(policy_changes: dict[str, Any], folder: Path) -> str:
    folder.mkdir()
    policy = tiny_policy(2, **policy_changes)
    assert run_ranks(save_once, 2, RunSettings(policy), str(folder), False) == [None, None]
    return str(folder)


@pytest.mark.full
def test_tensors_that_are_missing_or_have_no_place_are_named_on_all_ranks(tmp_path: Path) -> None:
    plain, shared = saved({}, tmp_path / "plain"), saved(SHARED_EXPERTS, tmp_path / "shared")
    stages = layout(pp=2)
    for policy_changes, folders in (({}, [shared, plain]), (SHARED_EXPERTS, [plain, shared])):
        policy = tiny_policy(2, **stages, **policy_changes)
        first, second = run_ranks(load_weights_alone, 2, RunSettings(policy), folders)
        assert first == second
        problem, last = first
        assert last == "loaded"
        wording = "lacks tensors of the model" if policy_changes else "holds tensors that the model has no place for"
        names = [f"decoder.layers.{n}.mlp.shared_experts.linear_fc{m}.weight" for n in range(4) for m in (1, 2)]
        assert problem.startswith(f"{folders[0]}: {wording} (8): {', '.join(names)}; config.json and ")


def test_resuming_refuses_tensors_without_a_place(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    assert run_ranks(save_once, 1, RunSettings(tiny_policy(**SHARED_EXPERTS)), str(folder)) == [None]
    ((problem,),) = run_ranks(problems_of_loading, 1, RunSettings(tiny_policy()), [str(folder)])
    assert "holds tensors that the model has no place for (8): decoder.layers.0.mlp.shared_experts" in problem


def test_expert_bias_begins_with_zeros_and_is_never_lost(tmp_path: Path) -> None:
    plain, biased = saved({}, tmp_path / "plain"), saved(EXPERT_BIAS, tmp_path / "biased")
    ((kept,),) = run_ranks(load_weights_alone, 1, RunSettings(tiny_policy(**EXPERT_BIAS)), [plain])
    assert kept == "loaded"
    ((problem,),) = run_ranks(load_weights_alone, 1, RunSettings(tiny_policy()), [biased])
    assert "no place for (4): decoder.layers.0.mlp.router.expert_bias" in problem
