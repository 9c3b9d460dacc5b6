# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""gpt-oss: its configuration, and its training in layouts, recomputed and from checkpoints.

`test_families.py` compares it with transformers.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.families.rules import InterleavedRows
from nemo_rl_moe.models.hf_files import load_hf_config
from nemo_rl_moe.models.megatron.cpu.sink_attention import SinkAttention
from nemo_rl_moe.models.megatron.model.memory_estimate import whole_model_parameters
from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config
from tests.support.checkpoint_run import load_and_train, train_and_save
from tests.support.family_models import FAMILY_MODELS
from tests.support.gloo_ranks import run_ranks
from tests.support.tiny_model import layout, parallel_job, tiny_policy
from tests.support.training_run import Difference, RankRun, RunSettings, build_trainer, difference, train_run

MODEL = "gpt_oss"
# Largest seen over all layouts and both versions of Megatron-Core: 9e-8, 3e-7, 2e-7 and 2e-6.
TOLERANCE = Difference(loss=5e-7, grad_norm=2e-6, moe_metrics=2e-6, weights=1e-5)
SHARDED = {"distributed_data_parallel_config__use_distributed_optimizer": True}
PACKED = {"sequence_packing__enabled": True, "sequence_packing__train_mb_tokens": 64}
slow = pytest.mark.slow

# As openai/gpt-oss-20b has it, but for the quantisation.
RELEASED: Mapping[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}


def settings(world_size: int = 1, sizes: Mapping[str, int] | None = None, **changes: Any) -> RunSettings:
    return RunSettings(tiny_policy(world_size, **layout(**(sizes or {})), **changes), model=MODEL)


@cache
def one_rank() -> RankRun:
    """The run that the others are compared with; made once."""
    return run_ranks(train_run, 1, settings(layer_spec="local"))[0]


@pytest.mark.parametrize(
    ("world_size", "sizes", "changes"),
    [
        pytest.param(1, {}, {}, id="fast modules", marks=slow),
        pytest.param(1, {}, PACKED, id="packed", marks=pytest.mark.full),
        pytest.param(2, {"tp": 2, "ep": 2}, SHARDED, id="tp2_ep2_zero1"),
        pytest.param(2, {"tp": 2}, PACKED, id="tp2_packed", marks=slow),
        pytest.param(2, {"tp": 2}, {"layer_spec": "local"}, id="tp2_local", marks=slow),
        pytest.param(2, {"tp": 2, "ep": 2}, {"layer_spec": "local"}, id="tp2_ep2_local", marks=slow),
        pytest.param(2, {"ep": 2}, {}, id="ep2", marks=slow),
        pytest.param(2, {"pp": 2, "vpp": 2}, {}, id="pp2_vpp2", marks=slow),
        pytest.param(4, {"tp": 2, "ep": 2, "pp": 2}, SHARDED, id="tp2_ep2_pp2_zero1", marks=slow),
        pytest.param(2, {"pp": 2}, {"activation_checkpointing": "full"}, id="recomputed", marks=slow),
        pytest.param(2, {"tp": 2}, {"activation_checkpointing": "moe"}, id="experts_recomputed", marks=slow),
    ],
)
def test_training_is_that_of_one_rank_with_megatrons_modules(
    world_size: int, sizes: dict[str, int], changes: dict[str, Any]
) -> None:
    found = difference(run_ranks(train_run, world_size, settings(world_size, sizes, **changes)), one_rank())
    print(found)
    for name, limit in vars(TOLERANCE).items():
        assert getattr(found, name) <= limit, f"{name}: {found}"


@pytest.mark.full
@pytest.mark.parametrize(
    ("world_size", "sizes", "changes"),
    [
        pytest.param(2, {"tp": 2}, {}, id="tp2"),
        pytest.param(1, {}, {}, id="one_rank", marks=slow),
        pytest.param(1, {}, {"layer_spec": "local"}, id="one_rank_local", marks=slow),
    ],
)
def test_bfloat16_trains_as_float32_does(world_size: int, sizes: dict[str, int], changes: dict[str, Any]) -> None:
    found = run_ranks(train_run, world_size, settings(world_size, sizes, precision="bfloat16", **changes))[0]
    assert found.losses == pytest.approx(one_rank().losses, rel=5e-3)
    assert found.grad_norms == pytest.approx(one_rank().grad_norms, rel=5e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ((2, {"tp": 2}, {}), (2, {"ep": 2}, {"layer_spec": "local"})),
        pytest.param((1, {}, {"layer_spec": "local"}), (2, {"tp": 2}, {}), marks=slow),
        pytest.param((2, {"ep": 2}, SHARDED), (2, {"pp": 2}, SHARDED), marks=slow),
    ],
)
def test_a_checkpoint_goes_on_in_another_layout(writer: Any, reader: Any, tmp_path: Path) -> None:
    arguments = str(tmp_path), 1, 3
    expected = run_ranks(train_and_save, writer[0], settings(*writer[:2], **writer[2]), *arguments)[0][1:]
    found = run_ranks(load_and_train, reader[0], settings(*reader[:2], **reader[2]), *arguments)[0]
    for step, wanted in zip(found, expected, strict=True):
        for name in ("loss", "grad_norm"):
            assert step[name] == pytest.approx(wanted[name], rel=2e-6)


def attention_windows(policy: Any) -> dict[int, int | None]:
    with parallel_job(policy):
        trainer = build_trainer(policy, MODEL)
        layers = [layer for chunk in trainer.chunks for layer in chunk.decoder.layers]
        cores = {layer.layer_number: layer.self_attention.core_attention for layer in layers}
        assert all(isinstance(core, SinkAttention) for core in cores.values())
        return {number: core.window for number, core in cores.items()}


def test_windows_belong_to_layers_of_the_whole_model() -> None:
    first, second = run_ranks(attention_windows, 2, tiny_policy(2, **layout(pp=2)))
    assert first | second == {1: 5, 2: None, 3: 5, 4: None}


def test_gate_and_up_rows_take_turns() -> None:
    rows = torch.tensor([[1, 1], [10, 10], [2, 2], [20, 20]])
    joined = InterleavedRows().join([rows], None)
    assert joined.tolist() == [[1, 1], [2, 2], [10, 10], [20, 20]]
    (split,) = InterleavedRows().split(joined, 1, None)
    assert torch.equal(split, rows)
    # A tensor-parallel rank's piece is made of the same piece of the tensor.
    assert InterleavedRows().join([rows[:2]], None).tolist() == [[1, 1], [10, 10]]


def config_of(folder: Path, **changes: Any) -> Any:
    values = {name: value for name, value in {**RELEASED, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(values))
    return load_hf_config(str(folder))


def test_released_configuration(tmp_path: Path) -> None:
    hf_config = config_of(tmp_path)
    config = build_transformer_config(tiny_policy(1), hf_config)
    # The model's card says 20.9 billion.
    assert whole_model_parameters(config, hf_config) == 20_914_757_184
    assert config.window_size == (127, 0)
    assert config.window_attn_skip_freq == [1, 0] * 12
    assert (config.add_bias_linear, config.add_qkv_bias, config.bias_dropout_fusion) == (True, True, False)
    assert (config.activation_func_clamp_value, config.glu_linear_offset) == (7.0, 1.0)
    # Cosines and sines carry 0.1 log(32) + 1 each (YaRN, arXiv:2309.00071, equation 22).
    assert config.softmax_scale == pytest.approx(1.3465735902799727**2 / 8)
    assert (config.num_moe_experts, config.moe_router_topk, config.moe_ffn_hidden_size) == (32, 4, 2880)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"quantization_config": {"quant_method": "mxfp4"}},
            r"quantization_config: got .*mxfp4.*write the checkpoint in bfloat16 first",
        ),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha: got 1.5, supported for gpt-oss: 1.702"),
        ({"attention_bias": False}, "attention_bias: got False, supported for gpt-oss: True"),
        ({"sinks_everywhere": True}, "sinks_everywhere: got True, a field that is not known for gpt-oss"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type: got 'dynamic'"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build_transformer_config(tiny_policy(1), config_of(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types: got 'chunked_attention', supported: "),
        ({"layer_types": ["full_attention"]}, "layer_types: got 1 entries, expected one for each of 4 layers"),
        ({"sliding_window": None}, "sliding_window: got None, expected 1 or more"),
        ({"sliding_window": 0}, "sliding_window: got 0, expected 1 or more"),
    ],
)
def test_windows_must_be_complete(changes: dict[str, Any], message: str) -> None:
    hf_config = FAMILY_MODELS[MODEL].hf_config()
    for name, value in changes.items():
        setattr(hf_config, name, value)
    with pytest.raises(ConfigurationError, match=message):
        build_transformer_config(tiny_policy(1), hf_config)


def test_experts_with_biases_are_not_cut() -> None:
    policy = tiny_policy(2, **layout(tp=2, etp=2))
    with pytest.raises(ConfigurationError, match="ETP==1"):
        build_transformer_config(policy, FAMILY_MODELS[MODEL].hf_config())
