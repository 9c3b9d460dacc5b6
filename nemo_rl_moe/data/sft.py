# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Reading and tokenization of conversations for supervised fine-tuning."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from nemo_rl_moe.data.chat import TokenizedExample, batch_tokenizer
from nemo_rl_moe.data.dataset import DataReport, ItemKind, ItemSize, OnBadLine, Progress, ReportWords, read_items
from nemo_rl_moe.data.image_tokens import NO_IMAGES, RecordImages, num_images_of
from nemo_rl_moe.data.loader import TokenStore
from nemo_rl_moe.data.record_forms import NO_KEYS, Keys
from nemo_rl_moe.data.sources import open_source
from nemo_rl_moe.data.speech import Speech
from nemo_rl_moe.data.template_inputs import NO_INPUTS, TemplateInputs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


WORDS = ReportWords("example", "to train on", "no response before truncation")
WORDS_WITH_IMAGES = replace(WORDS, dropped="no response, or not all images, before truncation")


class TokenizedDataset(TokenStore):
    def __init__(self, examples: Sequence[TokenizedExample], report: DataReport):
        super().__init__(examples)
        self.report = report


def load_sft_dataset(
    path: str,
    split: str,
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int,
    on_bad_line: OnBadLine = "stop",
    progress: Progress | None = None,
    run_wide: TemplateInputs = NO_INPUTS,
    images: RecordImages = NO_IMAGES,
    speech: Speech | None = None,
    keys: Keys = NO_KEYS,
) -> TokenizedDataset:
    """Read, tokenize and return conversations for supervised fine-tuning.

    Args:
        path: A file of text, or a data set that `datasets` can load.
        speech: See `batch_tokenizer`.
    """
    kind = ItemKind(
        WORDS if images.tokens is None else WORDS_WITH_IMAGES,
        batch_tokenizer(tokenizer, max_length, run_wide, images, speech),
        _size_of,
        lambda dropped: (
            f"of {dropped} nothing to train on, or not every image, fits into "
            f"policy.max_total_sequence_length={max_length} tokens"
            if images.tokens is not None
            else f"of {dropped} nothing to train on fits into policy.max_total_sequence_length={max_length} tokens"
        ),
    )
    return TokenizedDataset(*read_items(open_source(path, split, images.key, keys), kind, on_bad_line, progress))


def _size_of(example: TokenizedExample) -> ItemSize:
    trained = example.num_trained_tokens()
    return ItemSize(
        example.sample_id,
        len(example),
        trained,
        example.truncated,
        num_images_of(example.images),
        example.notes,
        is_dropped=not trained or example.lacks_images,
    )
