# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Which fields of a `config.json` a family understands. Any other one could change what the model computes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


def field_names(text: str) -> frozenset[str]:
    """The names in a text, between blanks."""
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


@dataclass(frozen=True)
class ConfigFields:
    """The fields of one family's `config.json`.

    Attributes:
        read: Those that the family's mapping uses.
        fixed: Those that must have one of these values: others are not supported.
        without_effect: Those that say nothing about what the model computes, besides the usual ones.
        advice: What to do about a value of `fixed` that is not supported, in place of the list of those that are.
    """

    read: frozenset[str]
    fixed: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    without_effect: frozenset[str] = frozenset()
    advice: Mapping[str, str] = field(default_factory=dict)

    def problems(self, config_json: Mapping[str, Any], hf_config: Any, family: str) -> list[str]:
        """What of a configuration is not supported, a line for each field.

        Args:
            config_json: The file as it is.
            hf_config: What transformers makes of it, its defaults included.
            family: The family's name.
        """
        lines = [
            f"{name}: got {getattr(hf_config, name)!r}, {self._what_to_do(name, values, family)}"
            for name, values in self.fixed.items()
            if getattr(hf_config, name, values[0]) not in values
        ]
        known = self.read | self.fixed.keys() | self.without_effect | _WITHOUT_EFFECT | _ALWAYS_READ
        lines += [
            f"{name}: got {value!r}, a field that is not known for {family} and could change what the model computes; "
            "take it out if it does not"
            for name, value in config_json.items()
            if name not in known
        ]
        return [f"policy.model_name: config.json: {line}" for line in lines]

    def _what_to_do(self, name: str, values: Sequence[Any], family: str) -> str:
        return self.advice.get(name) or f"supported for {family}: {_listed(values)}"


def _listed(values: Sequence[Any]) -> str:
    return " or ".join(repr(value) for value in values)
