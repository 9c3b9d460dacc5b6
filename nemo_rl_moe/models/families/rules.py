# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables of a model family: the fields of `config.json` that it supports, and the tensors of each parameter.

A field that no table names is an error, because it could change what the model computes.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from nemo_rl_moe.config.suggestions import shortened

if TYPE_CHECKING:
    from nemo_rl_moe.models.families.vision import VisionFamily


def field_names(text: str) -> frozenset[str]:
    """Return the names in a text, between blanks."""
    return frozenset(text.split())


# They say who made the model, how its text begins and ends, or how a program that runs it should go about it.
_WITHOUT_EFFECT = field_names(
    "_attn_implementation _name_or_path add_cross_attention architectures attn_implementation auto_map "
    "begin_suppress_tokens bos_token_id chunk_size_feed_forward decoder_start_token_id dtype eos_token_id "
    "forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label is_decoder is_encoder_decoder label2id "
    "max_position_embeddings model_type output_attentions output_hidden_states output_router_logits pad_token_id "
    "pretraining_tp problem_type return_dict sep_token_id suppress_tokens tokenizer_class torch_dtype torchscript "
    "transformers_version unsloth_fixed unsloth_version use_bfloat16 use_cache use_return_dict"
)
# What every family reads.
_ALWAYS_READ = field_names("vocab_size tie_word_embeddings")
_COUNTS = re.compile(r"(num_|n_)\w+|\w+_(size|dim|rank)")
_NEVER_ZERO = field_names("vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim")
ROTARY_BUFFERS = {r".*\.rotary_emb\.inv_freq": "buffers of the rotary embedding, which follow from config.json"}
"""Regular expression of tensors that older versions of transformers saved, and why no model reads them."""
LARGEST_SIZE, MOST_PARTS = 10**7, 10**4
"""Largest size, and largest number of layers or experts, that a `config.json` may ask for: today's models have up to
3 * 10^5 entries of the vocabulary, 130 layers, 512 experts a layer."""


@dataclass(frozen=True)
class ConfigFields:
    """The fields of one family's `config.json`.

    Attributes:
        read: Fields that the family's mapping uses.
        fixed: Fields that must have one of these values.
        without_effect: Fields without effect on the computation, besides the usual ones.
        advice: Help for an unsupported value of `fixed`, in place of the list of supported ones.
    """

    read: frozenset[str]
    fixed: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    without_effect: frozenset[str] = frozenset()
    advice: Mapping[str, str] = field(default_factory=dict)

    def problems(self, config_json: Mapping[str, Any], hf_config: Any, family: str, section: str = "") -> list[str]:
        """Return a line for each unsupported field of a configuration.

        Args:
            section: Prefix of each name, such as `vision_config.`.
        """
        lines = [
            f"{name}: got {shortened(repr(getattr(hf_config, name)))}, {self._what_to_do(name, values, family)}"
            for name, values in self.fixed.items()
            if getattr(hf_config, name, values[0]) not in values
        ]
        lines += [
            f"{name}: {problem}" for name, value in config_json.items() if (problem := _problem_with(name, value))
        ]
        known = self.read | self.fixed.keys() | self.without_effect | _WITHOUT_EFFECT | _ALWAYS_READ
        lines += [
            f"{shortened(name)}: got {shortened(repr(value))}, a field that is not known for {family} and could change "
            "what the model computes; take it out if it does not"
            for name, value in config_json.items()
            if name not in known
        ]
        return [f"policy.model_name: config.json: {section}{line}" for line in lines]

    def _what_to_do(self, name: str, values: Sequence[Any], family: str) -> str:
        return self.advice.get(name) or f"supported for {family}: {_listed(values)}"


def _problem_with(name: str, value: Any) -> str | None:
    """Return the fault of a number of a `config.json`, whatever the family; None: it has none."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"got {value}, expected a finite number"
    least = 1 if name in _NEVER_ZERO else 0
    most = MOST_PARTS if name.endswith(("layers", "experts")) else LARGEST_SIZE
    if type(value) is int and _COUNTS.fullmatch(name) and not least <= value <= most:
        return f"got {shortened(str(value))}, expected a whole number from {least} to {most:,}"
    return None


def _listed(values: Sequence[Any]) -> str:
    return " or ".join(repr(value) for value in values)


@dataclass(frozen=True)
class Source:
    """A Hugging Face tensor, or a section of its rows: a rule names a tensor once for each section, in their order.

    Attributes:
        name: With `{layer}` and `{expert}` in place of numbers.
        is_stacked: It holds all experts, `[experts, ...]`: take one.
        is_transposed: It is `[inputs, outputs]`, where Megatron-Core has `[outputs, inputs]`.
    """

    name: str
    is_stacked: bool = False
    is_transposed: bool = False


class TensorLayout(Protocol):
    """Layout of a parameter's source tensors within it; also for the pieces of a tensor-parallel rank."""

    def join(self, parts: Sequence[Tensor], hf_config: Any) -> Tensor: ...

    def split(self, parameter: Tensor, num_parts: int, hf_config: Any) -> Sequence[Tensor]: ...


@dataclass(frozen=True)
class Rows:
    """Concatenate equally many rows of each part."""

    def join(self, parts: Sequence[Tensor], hf_config: Any) -> Tensor:
        return torch.cat(list(parts)) if len(parts) > 1 else parts[0]

    def split(self, parameter: Tensor, num_parts: int, hf_config: Any) -> Sequence[Tensor]:
        return parameter.chunk(num_parts)


@dataclass(frozen=True)
class InterleavedRows:
    """One tensor with alternating gate and up rows; in the parameter all gate rows come before all up rows."""

    def join(self, parts: Sequence[Tensor], hf_config: Any) -> Tensor:
        return torch.cat([parts[0][0::2], parts[0][1::2]])

    def split(self, parameter: Tensor, num_parts: int, hf_config: Any) -> Sequence[Tensor]:
        return (torch.stack(parameter.chunk(2), dim=1).flatten(0, 1),)


@dataclass(frozen=True)
class QueryGroups:
    """Queries, keys and values: for each query group its query heads, then its key head, then its value head."""

    def join(self, parts: Sequence[Tensor], hf_config: Any) -> Tensor:
        heads_per_group, head_dim = heads_of(hf_config)
        groups = parts[1].shape[0] // head_dim
        grouped = [part.reshape(groups, -1, head_dim, *part.shape[1:]) for part in parts]
        assert grouped[0].shape[1] == heads_per_group
        return torch.cat(grouped, dim=1).flatten(0, 2)

    def split(self, parameter: Tensor, num_parts: int, hf_config: Any) -> Sequence[Tensor]:
        heads_per_group, head_dim = heads_of(hf_config)
        grouped = parameter.reshape(-1, heads_per_group + 2, head_dim, *parameter.shape[1:])
        return [part.flatten(0, 2) for part in grouped.split([heads_per_group, 1, 1], dim=1)]


def heads_of(hf_config: Any) -> tuple[int, int]:
    """Return the query heads of a group, and the size of a head."""
    heads = hf_config.num_attention_heads
    head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads
    return heads // hf_config.num_key_value_heads, head_dim


@dataclass(frozen=True)
class Rule:
    """Source tensors of one kind of parameter.

    Attributes:
        sources: Tensors that it consists of, in order, under the names that are written.
        alternatives: Other forms that are read where `sources` are missing or only these match the file's shapes.
    """

    sources: tuple[Source, ...]
    layout: TensorLayout = Rows()
    alternatives: tuple[tuple[Source, ...], ...] = ()
    expert: int | None = None


def rule(
    *sources: str | Source, layout: TensorLayout | None = None, alternatives: Sequence[Sequence[Source]] = ()
) -> Rule:
    as_sources = tuple(Source(source) if isinstance(source, str) else source for source in sources)
    return Rule(as_sources, Rows() if layout is None else layout, tuple(map(tuple, alternatives)))


class RuleTable:
    """All rules of a family.

    Args:
        rules: By canonical name, with `{layer}` and `{expert}` in place of numbers.
        prefixes: Hugging Face's prefix for each canonical one, for parameters without a rule, which are copied.
    """

    def __init__(self, rules: Mapping[str, Rule], prefixes: Mapping[str, str] | None = None):
        self._by_name, self._prefixes = dict(rules), dict(prefixes or {})
        self._rules = [(_as_pattern(name), found) for name, found in rules.items()]

    def find(self, name: str) -> Rule | None:
        """Return the rule of one parameter, with its numbers filled in; None where there is none."""
        for pattern, found in self._rules:
            if match := pattern.fullmatch(name):
                return _filled_in(found, match.groupdict())
        for ours, theirs in self._prefixes.items():
            if name.startswith(ours):
                return rule(theirs + name.removeprefix(ours))
        return None

    def within(self, rename: Callable[[str], str], prefixes: Mapping[str, str]) -> "RuleTable":
        """Return the table of a larger model that contains this one."""

        def renamed(sources: Sequence[Source]) -> tuple[Source, ...]:
            return tuple(replace(source, name=rename(source.name)) for source in sources)

        moved = {
            name: replace(found, sources=renamed(found.sources), alternatives=tuple(map(renamed, found.alternatives)))
            for name, found in self._by_name.items()
        }
        return RuleTable(moved, prefixes)


def _as_pattern(name: str) -> re.Pattern[str]:
    escaped = re.escape(name)
    for number in ("layer", "expert"):
        escaped = escaped.replace(re.escape(f"{{{number}}}"), rf"(?P<{number}>\d+)")
    return re.compile(escaped)


def _filled_in(found: Rule, numbers: Mapping[str, str]) -> Rule:
    def fill(sources: Sequence[Source]) -> tuple[Source, ...]:
        return tuple(replace(source, name=source.name.format(**numbers)) for source in sources)

    return Rule(
        fill(found.sources),
        found.layout,
        tuple(map(fill, found.alternatives)),
        int(numbers["expert"]) if "expert" in numbers else None,
    )


def _none_unused(hf_config: Any) -> Mapping[str, str]:
    del hf_config
    return {}


@dataclass(frozen=True)
class SequenceLimit:
    """Longest sequence that a family computes, whatever positions it has.

    Attributes:
        name: Plural noun of what is limited.
        why: Reason, where the name gives none.
    """

    tokens: int
    name: str
    why: str = ""


def _no_sequence_limit(config_json: Mapping[str, Any]) -> SequenceLimit | None:
    del config_json
    return None


def _no_indexed_layers(hf_config: Any) -> Sequence[int]:
    del hf_config
    return ()


def _whole_heads(hf_config: Any) -> float:
    del hf_config
    return 1.0


@dataclass(frozen=True)
class ModelFamily:
    """Mapping of one Hugging Face model type to Megatron-Core.

    Attributes:
        transformer_fields: Maps the Hugging Face configuration to TransformerConfig fields (without the layout).
        router_fields: The field of `config.json` for each router field of TransformerConfig that the model decides;
            None where the architecture leaves no choice.
        unused_tensors: Regular expressions (full match) of tensors that the model may ignore, each with the reason.
        exported_fields: Fields of an exported `config.json` that declare the left-out tensors absent.
        normalizes_all_heads: Norms of queries and keys run over all heads together.
        rotary_percent: Part of each head that is rotated, its first entries.
        indexed_layers: Layers with an indexer, whose weights are kept but not computed with.
        sequence_limit: Limit by a `config.json`; None: there is none but that of positions.
        transformers_type: `model_type` of transformers' class for such files, where theirs is none that it knows.
        vision: Parts beside the decoder; None for text alone.
    """

    name: str
    transformer_fields: Callable[[Any], dict[str, Any]]
    rotary_base: Callable[[Any], float]
    rules: RuleTable
    config_fields: ConfigFields
    router_fields: Mapping[str, str | None] = field(default_factory=dict)
    unused_tensors: Callable[[Any], Mapping[str, str]] = _none_unused
    exported_fields: Mapping[str, Any] = field(default_factory=dict)
    normalizes_all_heads: bool = False
    rotary_percent: Callable[[Any], float] = _whole_heads
    indexed_layers: Callable[[Any], Sequence[int]] = _no_indexed_layers
    sequence_limit: Callable[[Mapping[str, Any]], SequenceLimit | None] = _no_sequence_limit
    transformers_type: str | None = None
    vision: "VisionFamily | None" = None
