# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The command `nemo-rl-moe upcycle`: turns a dense model into a Mixture-of-Experts model, and compares the logits of
both."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from jaxtyping import Float
from safetensors import SafetensorError
from torch import Tensor

from nemo_rl_moe.errors import ConfigurationError, UserError
from nemo_rl_moe.launch.output_folder import require_free, staged
from nemo_rl_moe.models.hf_files import check_small_files, holds_megatron_weights, load_config_json, load_hf_config
from nemo_rl_moe.models.model_files import copied_model_files, missing_code_line
from nemo_rl_moe.models.safetensors_folder import SafetensorsFolder, listed, one_line
from nemo_rl_moe.models.upcycling import (
    ExpertShape,
    Upcycling,
    check_family,
    check_tensors,
    left_out,
    moe_config,
)
from nemo_rl_moe.runs.loggers.console import ConsoleLogger

_NUM_TOKENS = 64
_OF_16_BITS = ("BF16", "F16")


@dataclass(frozen=True)
class UpcyclingRequest:
    """What to upcycle: the folders, and the shape of the experts.

    Attributes:
        target: Folder of the output. It must be empty or not exist.
        seed: Seed of the routers' random weights.
        is_checked: Whether to compare the logits of both models. None: compare them if the new model in float32 takes
            at most half of the free memory.
    """

    source: Path
    target: Path
    shape: ExpertShape
    seed: int = 0
    is_checked: bool | None = None


@dataclass(frozen=True)
class LogitsDifference:
    """Comparison of two models on the same random tokens, in float32.

    Attributes:
        largest: Largest absolute difference of two logits.
        scale: Largest absolute logit of the first model.
        num_same: Number of positions, among `num_tokens`, at which both models rank the same token first.
    """

    largest: float
    scale: float
    num_same: int
    num_tokens: int

    def __str__(self) -> str:
        return (
            f"logits of {self.num_tokens} random tokens differ by at most {self.largest:.2g}, of up to "
            f"{self.scale:.3g}; the most likely next token is the same at {self.num_same}"
        )


def upcycle(request: UpcyclingRequest) -> None:
    """Write the model with experts, completely or not at all, and print the difference of its logits."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # set before torch looks for an accelerator
    console = ConsoleLogger(total_steps=0, live="auto")
    try:
        _upcycle(request, console)
    except UserError as error:
        # The checks name keys of a run's configuration.
        raise ConfigurationError([line.replace("policy.model_name:", "--model:") for line in error.problems]) from error


def _upcycle(request: UpcyclingRequest, console: ConsoleLogger) -> None:
    source, target = request.source, request.target
    config_json = _checked_config(request)
    hf_config = load_hf_config(str(source))
    if problems := request.shape.problems(hf_config.intermediate_size):
        raise ConfigurationError(problems)
    held = SafetensorsFolder(source)
    check_tensors(held, hf_config)
    upcycling = Upcycling(held, hf_config, request.shape, request.seed)
    files = copied_model_files(source, moe_config(config_json, hf_config, request.shape), hf_config)
    for warning in _warnings(request.shape, held, files):
        console.warn(warning)
    is_checked = _is_checked(request, upcycling, console)
    try:
        with staged(target) as staging:
            with console.phase(f"writing {target}") as progress:
                upcycling.write(staging, files, progress=progress)
            if is_checked:
                with console.phase("comparing the logits of both models"):
                    difference = compare_logits(source, staging)
                console.message(f"{difference}")
    except (OSError, SafetensorError) as error:
        raise ConfigurationError(f"--output: {target}: {one_line(error)}; no output is written") from error
    console.message(
        f"{target}: {upcycling.num_parameters:,} parameters, of which a token uses {upcycling.num_active_parameters:,}"
    )
    # In bfloat16, the scores of two copies can tie, and a token would use a slice of each.
    routers = " policy.megatron_cfg.moe_router_dtype=fp32" if request.shape.granularity > 1 else ""
    console.message(f"to train it: policy.model_name={target} policy.init=pretrained{routers}")


def _warnings(shape: ExpertShape, held: SafetensorsFolder, files: Mapping[str, bytes]) -> list[str]:
    """Return warnings about rounded weights, omitted tensors, and code that is not copied."""
    lines = []
    if shape.rounds_weights and any(tensor.dtype in _OF_16_BITS for tensor in held.tensors.values()):
        lines.append(
            f"--granularity {shape.granularity} is no power of two: its factors round weights of 16 bits, so the new "
            "model is close to the dense one and not equal to it"
        )
    if names := left_out(held):
        lines.append(f"{held.folder}: left out: {listed(sorted(names))}: {next(iter(names.values()))}")
    if line := missing_code_line(files):
        lines.append(line)
    return lines


def _is_checked(request: UpcyclingRequest, upcycling: Upcycling, console: ConsoleLogger) -> bool:
    """Return whether to compare the logits. If the user has not decided and memory is short, print why they are not
    compared."""
    if request.is_checked is not None:
        return request.is_checked
    needed, free = 4 * upcycling.num_parameters, psutil.virtual_memory().available
    if needed <= free / 2:
        return True
    console.message(
        f"logits are not compared: the model takes {needed / 1e9:.0f} GB in float32, and {free / 1e9:.0f} GB are free; "
        "--check compares them"
    )
    return False


def _checked_config(request: UpcyclingRequest) -> Mapping[str, Any]:
    """Return the dense model's `config.json`, after the checks that need no other file."""
    source, target = request.source, request.target
    if not source.is_dir():
        raise ConfigurationError(
            f"--model: got {str(source)!r}, which is no folder; for a model of the hub, give its folder in the hub's"
            " cache"
        )
    require_free(target)
    if target.resolve().is_relative_to(source.resolve()):
        raise ConfigurationError(f"--output: {target} lies in the model's folder; choose another place")
    check_small_files(source)
    config_json = load_config_json(str(source))
    check_family(config_json)
    if holds_megatron_weights(source):
        raise ConfigurationError(
            f"--model: {source} holds Megatron-Core's weights; convert them first: "
            f"nemo-rl-moe convert --from megatron --to hf --input {source} --output DIR"
        )
    return config_json


def compare_logits(dense: Path, moe: Path) -> LogitsDifference:
    """Compute the logits of the same random tokens with both models in transformers, and return their difference."""
    expected, found = _logits(dense), _logits(moe)
    if not (expected.isfinite().all() and found.isfinite().all()):
        raise ConfigurationError(f"--model: {dense}: its logits are NaN or infinite in float32; nothing is written")
    return LogitsDifference(
        largest=(expected - found).abs().max().item(),
        scale=expected.abs().max().item(),
        num_same=int((expected.argmax(-1) == found.argmax(-1)).sum()),
        num_tokens=_NUM_TOKENS,
    )


def _logits(folder: Path) -> Float[Tensor, "tokens vocabulary"]:
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    # "eager", because grouped matrix products need widths that are multiples of 16 bytes.
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, experts_implementation="eager"
    )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (1, _NUM_TOKENS), generator=generator)
    with torch.inference_mode():
        logits: Tensor = model(tokens).logits
    return logits[0]
