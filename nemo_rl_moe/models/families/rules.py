# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables of a model family: the supported fields of `config.json`, and the tensors of each parameter.

A field that no table names is an error, because it could change the computation.
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
    """Return the names that a text lists, separated by blank space."""
    return frozenset(text.split())


# Fields on the model's origin, its special tokens, or the program that runs it.
_WITHOUT_EFFECT = field_names(
    "_attn_implementation _name_or_path add_cross_attention architectures attn_implementation auto_map "
    "begin_suppress_tokens bos_token_id chunk_size_feed_forward decoder_start_token_id dtype eos_token_id "
    "forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label is_decoder is_encoder_decoder label2id "
    "max_position_embeddings model_type output_attentions output_hidden_states output_router_logits pad_token_id "
    "pretraining_tp problem_type return_dict sep_token_id suppress_tokens tokenizer_class torch_dtype torchscript "
    "transformers_version unsloth_fixed unsloth_version use_bfloat16 use_cache use_return_dict"
)
# Every family reads these fields.
_ALWAYS_READ = field_names("vocab_size tie_word_embeddings")
_COUNTS = re.compile(r"(num_|n_)\w+|\w+_(size|dim|rank)")
_NEVER_ZERO = field_names("vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim")
ROTARY_BUFFERS = {r".*\.rotary_emb\.inv_freq": "buffers of the rotary embedding, which follow from config.json"}
"""Regular expression of tensors that older versions of transformers saved -> reason why no model reads them."""
LARGEST_SIZE, MOST_PARTS = 10**7, 10**4
"""Maximum of sizes, and of numbers of layers or experts, in a `config.json`. Today's models have up to 3 * 10^5 entries
of the vocabulary, 130 layers, and 512 experts per layer."""


@dataclass(frozen=True)
class ConfigFields:
    """The fields of one family's `config.json`.

    Attributes:
        read: Fields that the family's mapping uses.
        fixed: Fields that must have one of these values.
        without_effect: Fields without effect on the computation, besides the usual ones.
        advice: Field of `fixed` -> help for an unsupported value, in place of the list of supported values.
    """

    read: frozenset[str]
    fixed: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    without_effect: frozenset[str] = frozenset()
    advice: Mapping[str, str] = field(default_factory=dict)

    def problems(self, config_json: Mapping[str, Any], hf_config: Any, family: str, section: str = "") -> list[str]:
        """Return a line for each unsupported field. `section` prefixes each name, such as `vision_config.`."""
        lines = []
        for name, values in self.fixed.items():
            if (value := getattr(hf_config, name, values[0])) not in values:
                advice = self.advice.get(name) or f"supported for {family}: {' or '.join(map(repr, values))}"
                lines.append(f"{name}: got {shortened(repr(value))}, {advice}")
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


def _problem_with(name: str, value: Any) -> str | None:
    """Return the problem if no family allows this number as value of the `config.json` field `name`, else None."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"got {value}, expected a finite number"
    least = 1 if name in _NEVER_ZERO else 0
    most = MOST_PARTS if name.endswith(("layers", "experts")) else LARGEST_SIZE
    if type(value) is int and _COUNTS.fullmatch(name) and not least <= value <= most:
        return f"got {shortened(str(value))}, expected a whole number from {least} to {most:,}"
    return None


@dataclass(frozen=True)
class Source:
    """A Hugging Face tensor, or a section of its rows. A rule names a tensor once for each section, in order.

    Attributes:
        name: Name with `{layer}` and `{expert}` in place of indices.
        is_stacked: Whether the tensor contains all experts, `[experts, ...]`.
        is_transposed: Whether the tensor is `[inputs, outputs]`. Megatron-Core has `[outputs, inputs]`.
    """

    name: str
    is_stacked: bool = False
    is_transposed: bool = False


class TensorLayout(Protocol):
    """Layout of the source tensors within a parameter. It also applies to the shards of a tensor-parallel rank."""

    def join(self, parts: Sequence[Tensor], hf_config: Any) -> Tensor: ...

    def split(self, parameter: Tensor, num_parts: int, hf_config: Any) -> Sequence[Tensor]: ...


@dataclass(frozen=True)
class Rows:
    """Concatenated rows of the source tensors, which all have the same number of rows."""

    def join(self, parts: Sequence[Tensor], hf_config: Any) -> Tensor:
        return torch.cat(list(parts)) if len(parts) > 1 else parts[0]

    def split(self, parameter: Tensor, num_parts: int, hf_config: Any) -> Sequence[Tensor]:
        return parameter.chunk(num_parts)


@dataclass(frozen=True)
class InterleavedRows:
    """One source tensor with alternating gate and up rows. In the parameter all gate rows come before all up rows."""

    def join(self, parts: Sequence[Tensor], hf_config: Any) -> Tensor:
        return torch.cat([parts[0][0::2], parts[0][1::2]])

    def split(self, parameter: Tensor, num_parts: int, hf_config: Any) -> Sequence[Tensor]:
        return (torch.stack(parameter.chunk(2), dim=1).flatten(0, 1),)


@dataclass(frozen=True)
class QueryGroups:
    """Joined queries, keys and values: for each query group its query heads, then its key head, then its value head."""

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
    """Return the number of query heads of a group, and the size of a head."""
    heads = hf_config.num_attention_heads
    head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads
    return heads // hf_config.num_key_value_heads, head_dim


@dataclass(frozen=True)
class Rule:
    """Source tensors of one kind of parameter.

    Attributes:
        sources: The tensors that form the parameter, in order. They are written under these names.
        alternatives: Other forms. They are read if `sources` are missing or do not match the file's shapes.
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
        rules: Canonical name, with `{layer}` and `{expert}` in place of indices -> rule.
        prefixes: Canonical prefix -> Hugging Face's prefix, for parameters that are copied without a rule.
    """

    def __init__(self, rules: Mapping[str, Rule], prefixes: Mapping[str, str] | None = None):
        self._by_name, self._prefixes = dict(rules), dict(prefixes or {})
        self._rules = [(_as_pattern(name), found) for name, found in rules.items()]

    def find(self, name: str) -> Rule | None:
        """Return the rule of one parameter, with its indices filled in, or None if there is no rule."""
        for pattern, found in self._rules:
            if match := pattern.fullmatch(name):
                return _filled_in(found, match.groupdict())
        for ours, theirs in self._prefixes.items():
            if name.startswith(ours):
                return rule(theirs + name.removeprefix(ours))
        return None

    def within(self, rename: Callable[[str], str], prefixes: Mapping[str, str]) -> "RuleTable":
        """Return the table of a larger model that contains this table's model.

        Args:
            rename: Function of a Hugging Face name that returns the name in the larger model's files.
            prefixes: See `RuleTable`.
        """

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


@dataclass(frozen=True)
class MtpTensors:
    """Layers of multi-token prediction (DeepSeek-AI 2024, arXiv:2412.19437, section 2.2) in a family's files.

    Attributes:
        count: Function of the Hugging Face configuration that returns the number of layers.
        prefix: Function of the configuration and a layer's index among these layers. It returns the prefix of the
            layer's tensors.
        ends: Name of a parameter within the layer, outside of its decoder layer -> name in files, in which `{prefix}`
            is replaced by the layer's prefix.
        copies: Canonical name of a parameter of the model -> name of its copy in files, as in `ends`.
    """

    count: Callable[[Any], int]
    prefix: Callable[[Any, int], str]
    ends: Mapping[str, str]
    copies: Mapping[str, str] = field(default_factory=dict)

    def find(self, name: str, rules: RuleTable, hf_config: Any) -> Rule | None:
        """Return the rule of a parameter such as `mtp.layers.0.eh_proj.weight`, or None if there is no rule.

        Args:
            rules: The rules of the family's decoder layers.
        """
        match = _FURTHER.fullmatch(name)
        if match is None:
            return None
        prefix = self.prefix(hf_config, int(match["index"]))
        if (end := self.ends.get(match["rest"])) is not None:
            return rule(end.format(prefix=prefix))
        layer = hf_config.num_hidden_layers
        of_decoder = rules.find(f"decoder.layers.{layer}.{match['rest'].removeprefix('transformer_layer.')}")
        if of_decoder is None or not match["rest"].startswith("transformer_layer."):
            return None
        in_files = re.compile(rf"model\.(language_model\.)?layers\.{layer}\.")

        def renamed(sources: Sequence[Source]) -> tuple[Source, ...]:
            return tuple(replace(source, name=in_files.sub(prefix, source.name, count=1)) for source in sources)

        alternatives = tuple(map(renamed, of_decoder.alternatives))
        return replace(of_decoder, sources=renamed(of_decoder.sources), alternatives=alternatives)

    def copies_in(self, hf_config: Any) -> dict[str, list[str]]:
        """Return canonical name of a parameter -> names of its copies in files, one for each layer."""
        prefixes = [self.prefix(hf_config, index) for index in range(self.count(hf_config))]
        found: dict[str, list[str]] = {}
        for name, copy in self.copies.items():
            # A tied output layer is the embedding.
            held = next(iter(self.copies)) if hf_config.tie_word_embeddings else name
            found.setdefault(held, []).extend(copy.format(prefix=prefix) for prefix in prefixes)
        return found


MTP_PREFIX = "mtp."
"""Prefix of the canonical names of parameters of multi-token prediction."""
_FURTHER = re.compile(r"mtp\.layers\.(?P<index>\d+)\.(?P<rest>.+)")


@dataclass(frozen=True)
class ModelFamily:
    """Mapping of one Hugging Face model type to Megatron-Core.

    Attributes:
        transformer_fields: Function of the Hugging Face configuration that returns TransformerConfig fields, without
            the layout.
        router_fields: Router field of TransformerConfig that the model determines -> field of `config.json`, or None if
            the architecture fixes it.
        unused_tensors: Regular expression (full match) of tensors that the model may ignore -> reason.
        kept_tensors: Regular expressions (full match) of tensors that are not loaded, and that exported folders contain
            unchanged: layers of multi-token prediction.
        mtp_layers: The tensors of `kept_tensors` as parameters that can be trained, or None if they can only be
            kept.
        exported_fields: Fields of an exported `config.json`, or of its `text_config`, for a folder without the kept
            tensors.
        normalizes_all_heads: Whether norms of queries and keys run over all heads together.
        rotates: Whether attention rotates queries and keys by their positions.
        rotary_percent: Share of each head's entries that is rotated, beginning with the first entry.
        indexed_layers: Indices of the layers with an indexer, which chooses the `index_topk` tokens that a token sees.
            Each other layer of such a model uses the choice of the last indexer before it.
        indexer_rotates_pairs: Whether rotary embedding in the indexer applies to pairs of neighbouring entries.
        transformers_type: `model_type` of transformers' class for these files, if transformers does not know the files'
            own type.
        takes_adapters: Whether its linear layers can have adapters.
        vision: Vision tower and projector, or None for a text model.
    """

    name: str
    transformer_fields: Callable[[Any], dict[str, Any]]
    rotary_base: Callable[[Any], float]
    rules: RuleTable
    config_fields: ConfigFields
    router_fields: Mapping[str, str | None] = field(default_factory=dict)
    unused_tensors: Callable[[Any], Mapping[str, str]] = lambda hf_config: {}
    kept_tensors: Callable[[Any], Sequence[str]] = lambda hf_config: ()
    mtp_layers: MtpTensors | None = None
    exported_fields: Mapping[str, Any] = field(default_factory=dict)
    normalizes_all_heads: bool = False
    rotates: bool = True
    rotary_percent: Callable[[Any], float] = lambda hf_config: 1.0
    indexed_layers: Callable[[Any], Sequence[int]] = lambda hf_config: ()
    indexer_rotates_pairs: bool = False
    transformers_type: str | None = None
    takes_adapters: bool = True
    vision: "VisionFamily | None" = None
