# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Fields of Megatron-Core's TransformerConfig beyond the keys, GPUs without Transformer Engine, workers' variables."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_moe.config.schema_policy import MegatronConfig
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.megatron.cpu import cpu_backend
from nemo_rl_moe.models.megatron.model import transformer_engine
from nemo_rl_moe.models.megatron.model.model_overrides import COMPUTING_FIELDS
from nemo_rl_moe.models.megatron.model.releases import (
    MEGATRON_VERSION,
    mark_duplicated_weights,
    transformer_config_fields,
)
from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config
from nemo_rl_moe.models.megatron.model.transformer_engine import require_transformer_engine
from nemo_rl_moe.models.megatron.model.transformer_problems import _problems_with_dispatcher
from nemo_rl_moe.models.policy.model_workers import _environment
from tests.support.tiny_model import layout, sharing_sequences, tiny_hf_config, tiny_policy

# isort: split
from megatron.core.transformer.enums import AttnBackend

KEY = "policy.megatron_cfg.model_overrides"


def overridden(**fields: Any) -> Any:
    return build_transformer_config(tiny_policy(1, model_overrides=fields), tiny_hf_config())


def problems_of(**fields: Any) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        overridden(**fields)
    return caught.value.problems


def test_fields_reach_the_configuration_last() -> None:
    assert build_transformer_config(tiny_policy(1), tiny_hf_config()).deallocate_pipeline_outputs is True
    fields = {
        "attention_backend": "flash",
        "cross_entropy_loss_fusion": True,
        "deallocate_pipeline_outputs": False,
        "distribute_saved_activations": False,
        "barrier_with_L1_time": False,
    }
    policy = tiny_policy(1, precision="bfloat16", model_overrides=fields)
    config = build_transformer_config(policy, tiny_hf_config())
    assert config.attention_backend is AttnBackend.flash
    assert (config.cross_entropy_loss_fusion, config.deallocate_pipeline_outputs) == (True, False)
    assert config.barrier_with_L1_time is False


def test_fields_that_cannot_be_set_are_all_reported_at_once() -> None:
    found = problems_of(
        attention_backend="flsh",
        cross_entropy_loss_fusion="yes",
        cross_entropy_los_fusion=True,
        init_method=3,
        cuda_graph_impl="local",
        fp8="hybrid",
        moe_router_topk=3,
        num_layers=3,
        params_dtype="bfloat16",
    )
    assert found == [
        f"{KEY}.attention_backend: got 'flsh': expected one of flash, fused, unfused, local, auto",
        f"{KEY}.cross_entropy_loss_fusion: got 'yes': Input should be a valid boolean",
        f"{KEY}.cross_entropy_los_fusion: megatron-core {MEGATRON_VERSION} has no such field of TransformerConfig;"
        " did you mean cross_entropy_loss_fusion?",
        f"{KEY}.init_method: cannot be set: YAML has no values of its type",
        f"{KEY}.cuda_graph_impl: is not supported: CUDA graphs run no hooks, so loads would be 0 and no route"
        " replayed, without an error",
        f"{KEY}.fp8: is not supported: packed sequences are no multiples of 16 tokens, and weights are exported in 16"
        " bits",
        f"{KEY}.moe_router_topk: has a key of its own: policy.megatron_cfg.moe_router_topk",
        f"{KEY}.num_layers: comes from the model's config.json",
        f"{KEY}.params_dtype: follows from policy.precision",
    ]


ANOTHER_MODEL = (
    "is not one of the fields that only change how a model is computed: the trained model could differ from the"
    " exported config.json"
)
PAGE = "docs/sft.md#fields-without-a-key"


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("no_rope_freq", 2, ANOTHER_MODEL),
        ("glu_linear_offset", 1.0, ANOTHER_MODEL),
        ("softmax_type", "learnable", ANOTHER_MODEL),
        ("layernorm_zero_centered_gamma", True, ANOTHER_MODEL),
        ("attention_output_gate", True, ANOTHER_MODEL),
        ("multi_latent_attention", True, ANOTHER_MODEL),
        ("linear_attention_freq", 2, ANOTHER_MODEL),
        ("heterogeneous_block_specs", True, ANOTHER_MODEL),
        ("test_mode", True, ANOTHER_MODEL),
        ("cuda_graph_warmup_steps", 1, "belongs to CUDA graphs, which are not supported"),
        ("qk_l2_norm", True, ANOTHER_MODEL),
        ("mtp_num_layers", 1, "has a key of its own: policy.megatron_cfg.mtp_num_layers"),
        (
            "fp32_residual_connection",
            True,
            "is not supported: activations between layers have the type of policy.precision",
        ),
        ("tp_comm_overlap", True, "needs buffers of Transformer Engine that this program does not make"),
        ("rotary_interleaved", True, ANOTHER_MODEL),
        ("embedding_init_method_std", 0.1, "has no effect: weights are set by this program, the same in every layout"),
    ],
)
def test_fields_that_change_the_model_or_have_no_effect_are_refused(name: str, value: Any, reason: str) -> None:
    (problem,) = problems_of(**{name: value})
    assert problem.startswith(f"{KEY}.{name}: {reason}")
    assert problem.endswith(f"({PAGE})") == (reason == ANOTHER_MODEL)


def test_the_allowed_fields_are_those_of_the_page_and_of_a_release() -> None:
    ours, newer = COMPUTING_FIELDS & transformer_config_fields(), COMPUTING_FIELDS - transformer_config_fields()
    if MEGATRON_VERSION.startswith("0.16"):
        assert newer == {
            "activation_offload_fraction",
            "cpu_offloading_retain_pinned_cpu_buffers",
            "delta_offload_bytes_across_pp_ranks",
            "fine_grained_offloading_max_inflight_offloads",
            "flash_attention_version",
            "fused_residual_rmsnorm",
            "high_priority_a2a_comm_stream",
        }
    else:
        assert newer == {"async_tensor_model_parallel_allreduce"}
    assert not ours & MegatronConfig.model_fields.keys()
    page = (Path(__file__).parents[4] / "docs/sft.md").read_text()
    section = page.partition("## Fields without a key")[2].partition("\n## ")[0]
    named = {name for row in re.findall(r"^\|[^|]*\|(.*)\|$", section, re.M) for name in re.findall(r"`(\w+)`", row)}
    assert named == COMPUTING_FIELDS


def test_a_fused_loss_does_not_round_gradients_of_float32() -> None:
    assert problems_of(cross_entropy_loss_fusion=True) == [
        f"{KEY}.cross_entropy_loss_fusion: got true with policy.precision float32, but the kernel rounds gradients"
        " to bfloat16; expected false"
    ]


def test_fused_weight_gradients_need_their_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems_of(gradient_accumulation_fusion=True) == [
        f"{KEY}.gradient_accumulation_fusion: got true, which needs Apex's extension fused_weight_gradient_mlp_cuda,"
        " which is not installed; expected false"
    ]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert overridden(gradient_accumulation_fusion=True).gradient_accumulation_fusion


def test_a_dispatcher_without_its_library_is_refused_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    flex = tiny_policy(1, moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="deepep")
    monkeypatch.setattr(cpu_backend, "ACTIVE", False)
    with pytest.raises(ConfigurationError) as caught:
        build_transformer_config(flex, tiny_hf_config())
    assert caught.value.problems == [
        "policy.megatron_cfg.moe_token_dispatcher_type: got flex with moe_flex_dispatcher_backend deepep, which needs"
        " the package deep_ep, which is not installed; expected alltoall"
    ]
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "deep_ep" else find_spec(name))
    assert not _problems_with_dispatcher({"moe_token_dispatcher_type": "flex"}, on_gpus=True)


def test_gpus_without_transformer_engine_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require_transformer_engine()  # on CPUs nothing is needed
    monkeypatch.setattr(cpu_backend, "ACTIVE", False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="training on GPUs needs Transformer Engine, which is not installed"):
        require_transformer_engine()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    problem: str | None = "Transformer Engine was compiled for another torch"
    monkeypatch.setattr(transformer_engine, "problem_with_extension", lambda: problem)
    with pytest.raises(ConfigurationError, match=f"^cluster.gpus_per_node: {problem}; or train on CPUs"):
        require_transformer_engine()
    problem = None
    require_transformer_engine()


class EngineLinear(torch.nn.Linear):
    """A linear layer with the marks of Transformer Engine's: all of its weights count as cut."""

    def __init__(self, parallel_mode: str | None):
        super().__init__(4, 4)
        self.parallel_mode = parallel_mode
        for parameter in self.parameters():
            parameter.tensor_model_parallel = True


def test_weights_that_every_rank_holds_whole_do_not_count_as_cut() -> None:
    experts = torch.nn.ModuleDict({"experts": torch.nn.ModuleDict({"linear_fc1": EngineLinear(None)})})
    model = torch.nn.ModuleDict(
        {"linear_q_down_proj": EngineLinear(None), "linear_q_up_proj": EngineLinear("column"), "mlp": experts}
    )
    mark_duplicated_weights(model)
    marks = {name: weight.tensor_model_parallel for name, weight in model.named_parameters() if name.endswith("weight")}
    assert list(marks.values()) == [False, True, True], marks


def test_variables_of_workers_follow_the_layout_and_then_the_user() -> None:
    assert _environment(tiny_policy(1), on_gpus=True) == {}
    tensor_parallel = tiny_policy(2, **layout(tp=2))
    assert _environment(tensor_parallel, on_gpus=False) == {}
    assert _environment(tensor_parallel, on_gpus=True) == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert _environment(sharing_sequences(tiny_policy(2), 2), on_gpus=True) == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    chosen = tiny_policy(2, env_vars={"CUDA_DEVICE_MAX_CONNECTIONS": "8", "NCCL_DEBUG": "INFO"}, **layout(tp=2))
    assert _environment(chosen, on_gpus=True) == {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "NCCL_DEBUG": "INFO"}
