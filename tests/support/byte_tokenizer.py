# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A byte-level tokenizer for tests: it encodes any text, and its tokens can be counted by hand."""

from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import ByteLevel as ByteLevelProcessor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

SPECIAL = ("<|start|>", "<|end|>", "<s>")


def make_byte_tokenizer(
    template: str | Mapping[str, str] | None = None,
    merges: Sequence[tuple[str, str]] = (),
    trim_offsets: bool = False,
    more_special: Sequence[str] = (),
    **special: str | None,
) -> PreTrainedTokenizerBase:
    """Return one token a byte, then the merges, then `<|start|>`, `<|end|>` (the end token) and `<s>`.

    Args:
        template: The chat template.
        merges: Pairs of pieces that make one token.
        trim_offsets: Blanks at the borders of a token do not count as its characters.
        more_special: Texts that are one token too.
        special: Further arguments of transformers, such as `eos_token`.
    """
    pieces = [*sorted(ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(BPE({piece: index for index, piece in enumerate(pieces)}, list(merges)))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.post_processor = ByteLevelProcessor(trim_offsets=trim_offsets)
    tokenizer.add_special_tokens([*SPECIAL, *more_special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=template, **{"eos_token": "<|end|>", **special}
    )
