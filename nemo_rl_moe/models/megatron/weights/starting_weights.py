# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Starting weights, random or from a folder, and the copy of the reference model.

Random weights depend on the seed and the parameter's name, never on the layout.
"""

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.families.rules import MTP_PREFIX
from nemo_rl_moe.models.hf_files import MEGATRON_WEIGHTS_FOLDER, holds_megatron_weights
from nemo_rl_moe.models.kept_tensors import KEPT_FOLDER
from nemo_rl_moe.models.layer_kinds import Mixer, num_residual_branches, recurrent_mixer
from nemo_rl_moe.models.megatron.checkpoint.load import load_model
from nemo_rl_moe.models.megatron.model.agreement import DamageSearch
from nemo_rl_moe.models.megatron.model.host_memory import host_tensors
from nemo_rl_moe.models.megatron.model.value_head import PREFIX as VALUE_HEAD_PREFIX
from nemo_rl_moe.models.megatron.model.vision_model import PREFIX as VISION_PREFIX
from nemo_rl_moe.models.megatron.weights.hf_import import load_weights
from nemo_rl_moe.models.megatron.weights.parameter_layout import ParameterPiece, parameter_pieces
from nemo_rl_moe.models.safetensors_folder import count_of

# Projections into the residual stream start smaller by the root of their number (GPT-2, Radford et al. 2019, 2.3).
_RESIDUAL_OUTPUTS = ("self_attention.linear_proj.weight", "self_attention.out_proj.weight", "linear_fc2.weight")
_DECAYS = (0.01, 16.0)
"""Range of the first decays of a gated delta net's heads, as in transformers."""


def initialize_weights(chunks: Sequence[GPTModel], config: TransformerConfig, hf_config: Any, seed: int) -> None:
    """Initialise every parameter except a vision tower's (see `add_vision`).

    Factors of norms are 1, and biases are 0. Decays and time steps of recurrent layers are initialised as in
    transformers, and convolutions as in torch. All other weights are normally distributed with the standard deviation
    `init_method_std`.
    """
    _initialize(chunks, config, hf_config, seed, lambda name: not name.startswith(VISION_PREFIX))


@torch.no_grad()
def _initialize(
    chunks: Sequence[GPTModel],
    config: TransformerConfig,
    hf_config: Any,
    seed: int,
    is_wanted: Callable[[str], bool],
) -> None:
    for piece in parameter_pieces(chunks, config):
        if is_wanted(piece.name):
            piece.local.copy_(piece.slice_of(_full_tensor(piece, config, hf_config, seed)))


# Default of `policy.init_seed`. With it, weights are the same as in releases without the key.
_FIRST_SEED = 1234


def _seed_of(name: str, seed: int) -> int:
    """Return the 32-bit seed of one parameter's random numbers. torch's CPU generator uses no more bits."""
    mixed = 0 if seed == _FIRST_SEED else zlib.crc32(str(seed).encode())
    return zlib.crc32(name.encode()) ^ mixed


def _full_tensor(piece: ParameterPiece, config: TransformerConfig, hf_config: Any, seed: int) -> torch.Tensor:
    if piece.name.endswith("norm.weight"):
        is_centered = config.layernorm_zero_centered_gamma and not piece.name.endswith("self_attention.out_norm.weight")
        return torch.zeros(piece.full_shape()) if is_centered else torch.ones(piece.full_shape())
    is_mamba = recurrent_mixer(config) is Mixer.MAMBA
    if piece.name.endswith("self_attention.D") or (piece.name.endswith("self_attention.dt_bias") and not is_mamba):
        return torch.ones(piece.full_shape())
    if piece.name.endswith("bias") and not piece.name.endswith("dt_bias"):
        return torch.zeros(piece.full_shape())
    scale = 1 / math.sqrt(num_residual_branches(config)) if piece.name.endswith(_RESIDUAL_OUTPUTS) else 1.0
    # The last pipeline stage has a copy of tied embeddings. It must equal the first stage's embeddings.
    tied = hf_config.tie_word_embeddings and piece.is_vocabulary
    name = "embedding.word_embeddings.weight" if tied else piece.name
    generator = torch.Generator().manual_seed(_seed_of(name, seed))
    shape = list(piece.full_shape())
    if piece.name.endswith("self_attention.dt_bias"):
        return _time_step_biases(torch.rand(shape, generator=generator), hf_config)
    if piece.name.endswith("self_attention.A_log"):
        if is_mamba:
            return torch.arange(1, shape[0] + 1).log()
        return torch.empty(shape).uniform_(*_DECAYS, generator=generator).log()
    if piece.name.endswith("self_attention.conv1d.weight"):
        return torch.empty(shape).uniform_(-1, 1, generator=generator) * shape[-1] ** -0.5
    if piece.is_vocabulary:
        # Padding depends on the layout, so it is added after sampling.
        shape[0] = hf_config.vocab_size
    sampled = torch.randn(shape, generator=generator) * (config.init_method_std * scale)
    return piece.pad_vocabulary(sampled)


def _time_step_biases(uniform: Tensor, hf_config: Any) -> Tensor:
    """Return biases of Mamba-2's time steps: softplus makes them log-uniform between the configuration's bounds."""
    low, high = math.log(hf_config.time_step_min), math.log(hf_config.time_step_max)
    steps = (uniform * (high - low) + low).exp().clamp(min=hf_config.time_step_floor)
    return steps + (-(-steps).expm1()).log()


def set_starting_weights(
    chunks: Sequence[GPTModel],
    config: TransformerConfig,
    hf_config: Any,
    folder: Path | None,
    init_seed: int,
    progress: Callable[[float], None] = lambda share: None,
    *,
    skips_mtp: bool = False,
) -> list[str]:
    """Fill every parameter, and return lines on ignored, kept and rounded tensors. Every rank calls it.

    Args:
        skips_mtp: Whether trained layers of multi-token prediction in a checkpoint may be skipped.
    """
    if folder is None:
        initialize_weights(chunks, config, hf_config, init_seed)
        return []
    # Few folders have a tensor for the value head.
    _initialize(chunks, config, hf_config, init_seed, lambda name: name.startswith(VALUE_HEAD_PREFIX))
    if holds_megatron_weights(folder):
        search = DamageSearch(folder / KEPT_FOLDER)
        stored = folder / KEPT_FOLDER
        reads_stored = stored.is_dir() and any(chunk.trains_mtp for chunk in chunks)
        skipped = [MTP_PREFIX] if reads_stored or skips_mtp else []
        ignored = load_model(chunks, folder / MEGATRON_WEIGHTS_FOLDER, skipped)
        if damage := search.of_all_ranks():
            raise ConfigurationError([f"policy.model_name: {line}" for line in damage])
        if reads_stored:
            load_weights(chunks, config, hf_config, stored, is_wanted=lambda name: name.startswith(MTP_PREFIX))
        of_mtp = [name for name in ignored if name.startswith(MTP_PREFIX)]
        lines = [f"{name} left out: the model has no value head" for name in ignored if name not in of_mtp]
        if of_mtp:
            lines.append(f"{count_of(of_mtp)} of multi-token prediction left out: only training on tokens uses them")
        return [f"{folder}: {line}" for line in lines]
    return load_weights(chunks, config, hf_config, folder, progress)


class ReferenceWeights:
    """A copy of a model's current weights on the host."""

    def __init__(self, chunks: Sequence[nn.Module]):
        self._live = [tensor for chunk in chunks for tensor in _weights(chunk)]
        # Copies from pinned memory to a GPU are several times faster.
        self._kept = host_tensors(self._live, pinned=any(tensor.is_cuda for tensor in self._live))
        with torch.no_grad():
            for kept, live in zip(self._kept, self._live, strict=True):
                kept.copy_(live)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the model the reference's weights while the context is open, and then its own weights, bit by bit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        # Only one tensor at a time exists three times. The third copy is on the model's device, so that all copies of a
        # GPU are from and to pinned memory, in the order of its stream, and the host does not wait.
        for live, kept in zip(self._live, self._kept, strict=True):
            incoming = kept.to(live.device, copy=True, non_blocking=True)
            kept.copy_(live, non_blocking=True)
            live.copy_(incoming)


def _weights(chunk: nn.Module) -> list[Tensor]:
    """Return the parameters, and the buffers that belong to the weights (a router's expert bias), each once."""
    persistent = chunk.state_dict(keep_vars=True).values()
    return list({id(value): value for value in persistent if isinstance(value, Tensor)}.values())
