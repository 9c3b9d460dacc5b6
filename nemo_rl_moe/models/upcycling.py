# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversion of a dense model to a Mixture-of-Experts model that computes the same function, tensor by tensor.

Experts are copies of the dense MLP, or slices of copies (He et al. 2024, arXiv:2410.07524, "virtual group"). With
granularity G each copy is cut into G slices, whose rows in the router are equal. So a token uses all G slices of a
copy, each with a G-th of the copy's weight, and the experts' outputs must be multiplied by G. Megatron-Core's
`upcycling_utils` multiplies all three matrices by the cube root of G, including the matrix before the activation. This
changes the function. Here the other two matrices share the factor: the function is the same, and if G is a power of two
no weight is rounded. Routers must compute in float32: if rows of two copies tie in bfloat16, a token may use slices of
both copies.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_rl_moe.checksums import write_inventory
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.families import FAMILIES, decoder
from nemo_rl_moe.models.families.rules import ROTARY_BUFFERS, ModelFamily
from nemo_rl_moe.models.model_files import write_model_files
from nemo_rl_moe.models.safetensors_files import (
    MAX_SHARD_BYTES,
    TYPES,
    SafetensorsWriter,
    SliceReader,
    TensorHeader,
    split_into_files,
    write_index,
)
from nemo_rl_moe.models.safetensors_folder import SafetensorsFolder, listed


@dataclass(frozen=True)
class _Counterpart:
    """The Mixture-of-Experts family for a dense family. `architecture` is the name of transformers' class."""

    model_type: str
    architecture: str
    has_shared_expert: bool = False


_MIXTRAL = _Counterpart("mixtral", "MixtralForCausalLM")
_COUNTERPARTS = {
    "llama": _MIXTRAL,
    "mistral": _MIXTRAL,
    "qwen2": _Counterpart("qwen2_moe", "Qwen2MoeForCausalLM", has_shared_expert=True),
    "qwen3": _Counterpart("qwen3_moe", "Qwen3MoeForCausalLM"),
}
# Fields that are always written, because their defaults differ between transformers' classes.
_MADE_EXPLICIT = (
    *sorted(decoder.READ_FIELDS - {"rope_parameters", "rope_theta", "rope_scaling"}),
    *("vocab_size", "tie_word_embeddings", "max_position_embeddings", "hidden_act", "attention_dropout"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
# `auto_map` refers to code of the dense model, which is not copied.
_OF_DENSE_MODELS_ALONE = frozenset({"attention_bias", "auto_map", "mlp_bias", "pretraining_tp"})
AUXILIARY_LOSS = 0.001
"""Value of `router_aux_loss_coef`: the default of transformers' classes for all three counterparts."""
_SHARE = 0.5
"""Weight of a shared expert whose gate is 0. The routed experts together get the same weight."""


@dataclass(frozen=True)
class ExpertShape:
    """Sizes of a layer's experts: their number, the number that a token uses, and the number of experts into which each
    copy of the dense MLP is sliced.
    """

    num_experts: int
    top_k: int
    granularity: int = 1

    def problems(self, width: int) -> list[str]:
        """Return a line for each number that does not fit the other numbers or the dense MLP's `width`."""
        slices = f"--granularity {self.granularity}"
        lines = []
        if self.top_k > self.num_experts:
            lines.append(f"--top-k: got {self.top_k}, expected at most --experts {self.num_experts}")
        for option, value in (("--experts", self.num_experts), ("--top-k", self.top_k)):
            if value % self.granularity:
                lines.append(f"{option}: got {value}, expected a multiple of {slices}: a token uses whole copies")
        if width % self.granularity:
            lines.append(f"--granularity: got {self.granularity}, expected a divisor of intermediate_size {width}")
        return lines

    @property
    def rounds_weights(self) -> bool:
        """Whether 16-bit weights are rounded, because they are scaled by a granularity that is not a power of two."""
        return bool(self.granularity & (self.granularity - 1))


def check_family(config_json: Mapping[str, Any]) -> None:
    """Check that a model has a Mixture-of-Experts counterpart."""
    model_type = config_json.get("model_type")
    if model_type in _COUNTERPARTS:
        return
    pairs = ", ".join(f"{dense} (to {found.model_type})" for dense, found in _COUNTERPARTS.items())
    has_experts = any(name in config_json for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    why = "has experts already" if has_experts else "has no counterpart with experts"
    raise ConfigurationError(f"--model: config.json: model_type {model_type!r} {why}; expected one of {pairs}")


def moe_config(config_json: Mapping[str, Any], hf_config: Any, shape: ExpertShape) -> dict[str, Any]:
    """Return the `config.json` of the model with experts, from that of the dense model."""
    counterpart = _COUNTERPARTS[config_json["model_type"]]
    content = {name: value for name, value in config_json.items() if name not in _OF_DENSE_MODELS_ALONE}
    content |= {name: value for name in _MADE_EXPLICIT if (value := getattr(hf_config, name, None)) is not None}
    if "rope_parameters" in content:
        content["rope_parameters"] = dict(hf_config.rope_parameters)
    else:
        content["rope_theta"] = decoder.rotary_base(hf_config)
    width = hf_config.intermediate_size // shape.granularity
    content |= {
        "architectures": [counterpart.architecture],
        "model_type": counterpart.model_type,
        "num_experts_per_tok": shape.top_k,
        "router_aux_loss_coef": AUXILIARY_LOSS,
    }
    if counterpart is _MIXTRAL:
        return content | {"num_local_experts": shape.num_experts, "intermediate_size": width, "sliding_window": None}
    content |= {
        "num_experts": shape.num_experts,
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return content | (
        {"shared_expert_intermediate_size": hf_config.intermediate_size} if counterpart.has_shared_expert else {}
    )


def left_out(held: SafetensorsFolder) -> dict[str, str]:
    """Return name -> reason, for the tensors that no model reads."""
    return {
        name: why for pattern, why in ROTARY_BUFFERS.items() for name in held.tensors if re.fullmatch(pattern, name)
    }


def check_tensors(held: SafetensorsFolder, hf_config: Any) -> None:
    """Check that a folder has exactly the tensors of a dense model, apart from `left_out`."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        expected = {
            name: tuple(of.shape) for name, of in AutoModelForCausalLM.from_config(hf_config).state_dict().items()
        }
    may_lack = {"lm_head.weight"} if hf_config.tie_word_embeddings else set()
    both = held.tensors.keys() & expected.keys()
    lines = [
        f"{what}: {listed(sorted(names))}"
        for what, names in (
            ("tensors missing", expected.keys() - held.tensors.keys() - may_lack),
            ("tensors that the model has no place for", held.tensors.keys() - expected.keys() - left_out(held).keys()),
            (
                "tensors of another shape than config.json says",
                {n for n in both if held.tensors[n].shape != expected[n]},
            ),
            (f"tensors that are not {', '.join(TYPES)}", {n for n in both if held.tensors[n].dtype not in TYPES}),
        )
        if names
    ]
    if lines:
        raise ConfigurationError([f"--model: {held.folder}: {line}" for line in lines])


@dataclass(frozen=True)
class _Part:
    """A tensor to be written, and the function that computes it from its source."""

    header: TensorHeader
    of: Callable[[Tensor], Tensor]


class Upcycling:
    """The tensors of the model with experts, each computed from one tensor of the dense model.

    Args:
        seed: Seed of the routers' random weights (normal, with the standard deviation `initializer_range`).
    """

    def __init__(self, held: SafetensorsFolder, hf_config: Any, shape: ExpertShape, seed: int):
        self._held, self._hf_config, self._shape, self._seed = held, hf_config, shape, seed
        self._counterpart = _COUNTERPARTS[hf_config.model_type]
        self._dense, self._moe = FAMILIES[hf_config.model_type], FAMILIES[self._counterpart.model_type]
        of_mlps: dict[str, list[_Part]] = {}
        for layer in range(hf_config.num_hidden_layers):
            of_mlps |= self._mlp(layer)
        # File by file, for the reader.
        names = sorted(held.tensors.keys() - left_out(held).keys(), key=lambda name: (held.tensors[name].file, name))
        self._parts = {name: of_mlps.get(name) or [self._part(name, name)] for name in names}

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(part.header.shape) for parts in self._parts.values() for part in parts)

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters that a token uses."""
        width = self._hf_config.intermediate_size // self._shape.granularity
        of_experts = 3 * width * self._hf_config.hidden_size * self._hf_config.num_hidden_layers
        return self.num_parameters - (self._shape.num_experts - self._shape.top_k) * of_experts

    def write(
        self,
        folder: Path,
        files: Mapping[str, bytes],
        *,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        progress: Callable[[float], None] = lambda share: None,
    ) -> None:
        """Write the new model's folder, with one dense tensor in memory at a time. The folder must not exist.

        Args:
            files: Name -> content of the small files.

        Raises:
            OSError: A file cannot be read or written.
        """
        folder.mkdir(parents=True)
        write_model_files(files, folder)
        headers = split_into_files((part.header for parts in self._parts.values() for part in parts), max_shard_bytes)
        writer = SafetensorsWriter(folder, write_index(folder, headers))
        with SliceReader(self._held) as reader:
            for number, (name, parts) in enumerate(self._parts.items(), start=1):
                shape = self._held.tensors[name].shape
                whole = torch.empty(shape, dtype=reader.dtype(name))
                reader.read_into(whole, name, [(0, length) for length in shape])
                for part in parts:
                    made = part.of(whole)
                    if not made.isfinite().all():
                        raise ConfigurationError(f"--model: {self._held.folder}: {name}: {_not_finite(whole, made)}")
                    writer.write(made)
                progress(number / len(self._parts))
        writer.close()
        write_inventory(folder, writer.parts)

    def _mlp(self, layer: int) -> dict[str, list[_Part]]:
        """Return name of a tensor of a layer's dense MLP -> parts that are made from the tensor."""
        mlp = f"decoder.layers.{layer}.mlp."
        gate, up, down = _swiglu_names(self._dense, mlp)
        (router,) = _names(self._moe, f"{mlp}router.weight")
        hidden_size = self._hf_config.hidden_size
        parts: dict[str, list[_Part]] = {gate: [], up: [], down: []}
        parts[gate].append(self._part(gate, router, (self._shape.num_experts, hidden_size), self._router_of(layer)))
        count = self._shape.granularity
        share = _SHARE if self._counterpart.has_shared_expert else 1.0
        for expert in range(self._shape.num_experts):
            names = _swiglu_names(self._moe, f"{mlp}experts.{expert}.")
            self._add_slice(parts, names, expert % count, count, share)
        if self._counterpart.has_shared_expert:
            self._add_slice(parts, _swiglu_names(self._moe, f"{mlp}shared_experts."), 0, 1, 1.0)
            (shared_gate,) = _names(self._moe, f"{mlp}shared_experts.gate_weight")
            parts[gate].append(self._part(gate, shared_gate, (1, hidden_size), lambda whole: torch.zeros(hidden_size)))
        return parts

    def _add_slice(
        self, parts: dict[str, list[_Part]], names: Sequence[str], index: int, count: int, share: float
    ) -> None:
        """Add one of `count` slices of the dense MLP to `parts`, as an expert.

        If the router weights each slice by `1 / count`, all slices together give `share` times the MLP's output.
        """
        of_up = 2.0 ** math.ceil(math.log2(count) / 2)
        factors = (1.0, of_up, share * count / of_up)
        for source, name, along, factor in zip(parts, names, (0, 0, 1), factors, strict=True):
            shape = list(self._held.tensors[source].shape)
            shape[along] //= count
            parts[source].append(self._part(source, name, tuple(shape), _slice_of(along, index, count, factor)))

    def _router_of(self, layer: int) -> Callable[[Tensor], Tensor]:
        def router(whole: Tensor) -> Tensor:
            config, count = self._hf_config, self._shape.granularity
            generator = torch.Generator().manual_seed(self._seed * config.num_hidden_layers + layer)
            of_copies = torch.randn(self._shape.num_experts // count, config.hidden_size, generator=generator)
            return (config.initializer_range * of_copies).repeat_interleave(count, dim=0)

        return router

    def _part(
        self,
        source: str,
        name: str,
        shape: tuple[int, ...] | None = None,
        of: Callable[[Tensor], Tensor] = lambda whole: whole,
    ) -> _Part:
        """Return a tensor to be written, with the type of its source and, by default, the source's shape."""
        stored = self._held.tensors[source]
        dtype = TYPES[stored.dtype]
        return _Part(TensorHeader(name, shape or stored.shape, dtype), lambda whole: of(whole).to(dtype))


def _slice_of(along: int, index: int, count: int, factor: float) -> Callable[[Tensor], Tensor]:
    return lambda whole: whole.chunk(count, dim=along)[index] * factor


def _not_finite(source: Tensor, made: Tensor) -> str:
    bad = int((~source.isfinite()).sum())
    if bad:
        return f"{bad:,} of {source.numel():,} weights are NaN or infinite"
    return f"slices of it exceed {str(made.dtype).removeprefix('torch.')}; a smaller --granularity has smaller factors"


def _names(family: ModelFamily, parameter: str) -> list[str]:
    found = family.rules.find(parameter)
    assert found is not None, parameter
    return [source.name for source in found.sources]


def _swiglu_names(family: ModelFamily, prefix: str) -> list[str]:
    """Return the names of the gate, up and down matrices."""
    return [name for part in ("linear_fc1", "linear_fc2") for name in _names(family, f"{prefix}{part}.weight")]
