# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Published chat templates beside those of `families.py`, with stand-in tokenizers that have their special tokens."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from examples.published_packages import PACKAGES
from tests.support.chat_templates import make_byte_tokenizer
from tests.world.families import FAMILIES, LLAMA_CPP, TRL
from tests.world.spoken import Spoken

_SPECIAL = re.compile(
    r"<\|[A-Za-z0-9_ ]+\|>|<｜[^>｜'\" ]+｜>|<(?:start|end)_of_turn>|<\|turn>|<turn\|>|<\|channel>|<channel\|>"
    r"|<seed:[a-z_]+>|<s>|</s>|\]~!?b\[?\]?|\[e~\[|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS"
    r"|TOOL_CONTENT|ARGS|CALL_ID|THINK)\]"
)
# Tokens that end a turn in some model, the likelier ones first; and others that end one beside the first.
_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|return|>",
    "<|end|>",
    "<｜end▁of▁sentence｜>",
    "<end_of_turn>",
    "<turn|>",
    "[e~[",
    "<seed:eos>",
    "<|END_OF_TURN_TOKEN|>",
    "<|assistant_end|>",
    "<|hy_eos|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|user|>",
    "</s>",
)
_FURTHER_ENDS = ("<|call|>", "<|observation|>", "<|eom_id|>")


@dataclass(frozen=True)
class OtherTemplate:
    """A published chat template."""

    package: str
    file: str

    @property
    def name(self) -> str:
        stem = self.file.removesuffix(".jinja")
        return f"TRL: {stem}" if self.package == TRL else stem

    def spoken(self, folder: Path) -> Spoken:
        """Make the stand-in tokenizer.

        Args:
            folder: Of the package.
        """
        template = (folder / self.file).read_text(encoding="utf-8")
        special = sorted(set(_SPECIAL.findall(template)) | {"<s>", "</s>"})
        end = next(text for text in _ENDS if text in template or text == "</s>")
        tokenizer = make_byte_tokenizer(template, more_special=special, eos_token=end)
        tokenizer.bos_token = "<s>"
        named = [text for text in (end, *_FURTHER_ENDS) if text in special]
        if end == "<|user|>":  # GLM's
            named.append("<|endoftext|>")
        ids = [tokenizer.convert_tokens_to_ids(text) for text in dict.fromkeys(named)]
        return Spoken(tokenizer, [token for token in ids if token is not None], {})


def other_templates() -> Iterator[OtherTemplate]:
    """Yield every downloaded template that no family of `families.py` has; none if a package is missing."""
    of_families = {family.template for family in FAMILIES}
    for package in PACKAGES:
        if package.key in (TRL, LLAMA_CPP) and package.is_there():
            for path in sorted(package.folder.glob("*.jinja")):
                if (package.key, path.name) not in of_families and not path.stem.endswith("_training"):
                    yield OtherTemplate(package.key, path.name)
