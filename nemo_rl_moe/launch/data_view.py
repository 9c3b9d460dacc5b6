# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Shows the training data of a run in the terminal: its tokens as text, with marks at trained and truncated tokens."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, TextIO

import numpy as np
from rich.console import Console
from rich.text import Text

from nemo_rl_moe.config.algorithm import algorithm_of
from nemo_rl_moe.config.schema import GRPOMasterConfig, MasterConfig, PairMasterConfig, RMMasterConfig, SFTMasterConfig
from nemo_rl_moe.data.chat import TokenizedExample, batch_tokenizer
from nemo_rl_moe.data.image_tokens import RecordImages
from nemo_rl_moe.data.margins import Margins
from nemo_rl_moe.data.preferences import PreferenceRecord, load_preferences, pair_parser, preference_columns
from nemo_rl_moe.data.records import Example
from nemo_rl_moe.data.scored_pairs import up_to_score
from nemo_rl_moe.data.sft import load_sft_dataset
from nemo_rl_moe.data.sources import load_limit, open_lines, open_source
from nemo_rl_moe.data.speech import Speech, describe_speech, load_published
from nemo_rl_moe.data.template_inputs import run_wide_inputs
from nemo_rl_moe.data.tokenizer import load_tokenizer
from nemo_rl_moe.errors import ConfigurationError, counted, printable
from nemo_rl_moe.launch.prompts import read_training_prompts
from nemo_rl_moe.launch.setup import announce_speech, images_of_data, read_samples, use_corrected_template
from nemo_rl_moe.models.classifiers import scored_pad_token_id
from nemo_rl_moe.models.hf_files import load_config_json, load_hf_config
from nemo_rl_moe.models.image_rules import ImageRule, load_image_rule
from nemo_rl_moe.runs.loggers.console import ConsoleLogger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_CUT_TOKENS = 200
"""Maximum number of truncated tokens that are shown."""


@dataclass(frozen=True)
class Kind:
    """A kind of tokens, and how it is shown: `style` in colour, `marks` before and after it without colour."""

    name: str
    style: str
    marks: tuple[str, str]


CONTEXT = Kind("context", "default", ("", ""))
TRAINED = Kind("trained on", "bold green", ("[[", "]]"))
CUT = Kind("truncated", "red strike", ("{{", "}}"))


@dataclass(frozen=True)
class ShownSequence:
    """One sequence to show.

    Attributes:
        example: The tokens, including tokens beyond `max_length`.
        max_length: Number of tokens that are kept. Later tokens are truncated.
    """

    example: TokenizedExample
    max_length: int

    def kinds(self) -> list[Kind]:
        """Return the kind of each token."""
        mask = self.example.token_mask
        return [CUT if i >= self.max_length else TRAINED if mask[i] else CONTEXT for i in range(len(mask))]

    def image_numbers(self) -> list[int | None]:
        """Return, for each token, the number of the image to which it belongs, or None for text."""
        numbers: list[int | None] = [None] * len(self.example)
        for number, (first, count) in enumerate(self.example.images.runs if self.example.images is not None else ()):
            numbers[first : first + count] = [number] * count
        return numbers

    def images(self) -> list[str]:
        """Return a description of each image: height and width in the file, and its number of tokens."""
        images = self.example.images
        if images is None:
            return []
        return [
            f"[image {image.height}x{image.width}, {counted(count, 'token')}]"
            for image, (_, count) in zip(images.images, images.runs, strict=True)
        ]

    def title(self) -> str:
        """Return a title with the source of the sample and its numbers of kept, trained and truncated tokens."""
        kinds = self.kinds()
        num_truncated, more = kinds.count(CUT), "more than " if self.example.truncated else ""
        parts = [counted(len(kinds) - num_truncated, "token")]
        if num_trained := kinds[1:].count(TRAINED):
            parts.append(f"{num_trained:,} to train on")
        if num_truncated:
            parts.append(f"{more}{num_truncated:,} truncated")
        return f"{self.example.sample_id}: {', '.join([*parts, *(f'with {note}' for note in self.example.notes)])}"


@dataclass(frozen=True)
class DataView:
    """The samples to show, and the lengths of all samples.

    Attributes:
        lengths: Number of tokens of every sequence of the data, as a run would train on it.
    """

    sequences: Sequence[ShownSequence]
    lengths: Sequence[int]
    max_length: int


def show_data(config: MasterConfig, number: int, stream: TextIO | None = None) -> None:
    """Read the training data, and print its first `number` samples and the length of the longest sequence. Starts no
    worker.

    Args:
        stream: Destination. None: standard output.
    """
    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    in_colour = console.is_terminal and not os.environ.get("NO_COLOR")
    logger = ConsoleLogger(total_steps=0, live=config.logger.console.live, stream=stream)
    tokenizer = load_tokenizer(config.policy.tokenizer.name, config.policy.tokenizer.chat_template)
    use_corrected_template(tokenizer, config.policy.tokenizer, logger)
    speech = describe_speech(tokenizer, load_published(config.policy.model_name), config.data.chat_template_kwargs)
    announce_speech(speech, tokenizer, logger)
    view = _DataReader(tokenizer, logger, number, _image_rule(config), speech).view(config)
    logger.close()

    def show(text: Text) -> None:
        console.print(text, soft_wrap=True)

    show(Text(f"longest: {counted(max(view.lengths), 'token')}, of at most {view.max_length:,}"))
    legend = Text("tokens: ")
    for kind in (CONTEXT, TRAINED, CUT):
        legend.append_text(_piece(kind.name, kind, in_colour)).append(" " if kind is not CUT else "")
    show(legend)
    for sequence in view.sequences:
        show(Text(f"\n{printable(sequence.title())}", style="bold" if in_colour else ""))
        show(sequence_text(sequence, tokenizer.decode, in_colour))


def _image_rule(config: MasterConfig) -> ImageRule | None:
    name = config.policy.model_name
    # Other problems of the model are only reported when a run starts.
    return load_image_rule(name, load_hf_config(name)) if "vision_config" in load_config_json(name) else None


@dataclass(frozen=True)
class _DataReader:
    """Reads an algorithm's training data, and keeps `number` samples to show."""

    tokenizer: "PreTrainedTokenizerBase"
    logger: ConsoleLogger
    number: int
    image_rule: ImageRule | None
    speech: Speech

    def view(self, config: MasterConfig) -> DataView:
        if isinstance(config, SFTMasterConfig):
            return self._conversations(config)
        if isinstance(config, PairMasterConfig):
            return self._pairs(config)
        if isinstance(config, GRPOMasterConfig):
            return self._prompts(config)
        name = algorithm_of(config).name
        raise ConfigurationError(
            f"algorithm: got {name}, whose data cannot be shown; expected an algorithm with the data of sft, dpo,"
            " rm or grpo"
        )

    def _conversations(self, config: SFTMasterConfig) -> DataView:
        source = config.data.train
        dataset = read_samples(
            load_sft_dataset, config, source, self.tokenizer, self.logger, self.image_rule, self.speech
        )
        lines = open_source(source.path, source.split, config.data.image_key, config.data.keys).lines
        originals = (line for line in lines if isinstance(line, Example))
        sequences = self._with_truncated_tokens(config, dataset[: self.number], originals)
        return DataView(sequences, [len(example) for example in dataset], config.policy.max_total_sequence_length)

    def _pairs(self, config: PairMasterConfig) -> DataView:
        source, key, keys = config.data.train, config.data.image_key, config.data.keys
        margins = Margins(config.data.margin_key) if isinstance(config, RMMasterConfig) else None
        load = partial(load_preferences, margins=margins)
        pairs = read_samples(load, config, source, self.tokenizer, self.logger, self.image_rule, self.speech)
        columns = partial(preference_columns, image_key=key, keys=keys)
        lines = open_lines(source.path, source.split, pair_parser(key, keys), columns).lines
        originals = (
            response
            for line in lines
            if isinstance(line, PreferenceRecord)
            for response in (line.chosen, line.rejected)
        )
        responses = [response for pair in pairs for response in (pair.chosen, pair.rejected)]
        if isinstance(config, RMMasterConfig):
            padding = scored_pad_token_id(load_hf_config(config.policy.model_name), self.tokenizer)
            responses = [up_to_score(response, padding) for response in responses]
        sequences = self._with_truncated_tokens(config, responses[: 2 * self.number], originals)
        lengths = [len(response) for response in responses]
        return DataView(sequences, lengths, config.policy.max_total_sequence_length)

    def _prompts(self, config: GRPOMasterConfig) -> DataView:
        datasets = read_training_prompts(config, self.tokenizer, self.logger, image_rule=self.image_rule)
        prompts = [prompt for prompts in datasets.values() for prompt in prompts]
        most = config.policy.max_total_sequence_length - config.policy.generation.max_new_tokens
        sequences = []
        for prompt in prompts[: self.number]:
            ids = np.asarray(prompt.token_ids, dtype=np.int32)
            mask = np.zeros(len(ids), dtype=np.bool_)
            example = TokenizedExample(ids, mask, False, prompt.sample_id, prompt.images, prompt.notes)
            sequences.append(ShownSequence(example, most))
        return DataView(sequences, [len(prompt.token_ids) for prompt in prompts], most)

    def _with_truncated_tokens(
        self,
        config: SFTMasterConfig | PairMasterConfig,
        examples: Sequence[TokenizedExample],
        originals: Iterator[Example],
    ) -> list[ShownSequence]:
        """Return the examples with some of their truncated tokens. To get these tokens, the data is read again."""
        max_length, data = config.policy.max_total_sequence_length, config.data
        cut = {example.sample_id for example in examples if example.truncated}
        run_wide = run_wide_inputs(data.tools, data.chat_template_kwargs)
        longer: dict[str, TokenizedExample] = {}
        if cut:
            images = RecordImages(
                data.image_key, images_of_data(data, data.train.path, self.tokenizer, self.image_rule)
            )
            tokenize = batch_tokenizer(self.tokenizer, max_length + MOST_CUT_TOKENS, run_wide, images, self.speech)
            with load_limit(data.load_timeout_s, data.train.path):
                for original in originals:
                    if original.sample_id in cut:
                        (result,) = tokenize([original])
                        assert isinstance(result, TokenizedExample)
                        longer[result.sample_id] = result
                    if len(longer) == len(cut):
                        break
        return [ShownSequence(longer.get(example.sample_id, example), len(example)) for example in examples]


def sequence_text(sequence: ShownSequence, decode: Callable[[Sequence[int]], str], in_colour: bool) -> Text:
    """Return a sequence as text, in which the kinds of tokens are marked by colours or brackets."""
    ids = sequence.example.input_ids.tolist()
    text, place, reported = Text(), 0, ""
    shown = sequence.images()
    for (kind, image), run in groupby(zip(sequence.kinds(), sequence.image_numbers(), strict=True)):
        first, place = place, place + len(list(run))
        if image is not None:
            text.append_text(_piece(shown[image], kind, in_colour))
            reported = decode(ids[:place])
            continue
        # Some tokenizers drop a leading space, so the text of a run of tokens is what it adds to the text before.
        so_far = decode(ids[:place])
        gained = so_far[len(reported) :] if so_far.startswith(reported) else decode(ids[first:place])
        text.append_text(_piece(gained, kind, in_colour))
        reported = so_far
    if sequence.example.truncated:
        text.append_text(_piece(" ...", CUT, in_colour))
    return text


def _piece(text: str, kind: Kind, in_colour: bool) -> Text:
    """Return a text of the data, marked as its kind, with control characters escaped."""
    shown = printable(text)
    if in_colour:
        return Text(shown, style=kind.style)
    before, after = kind.marks
    return Text(f"{before}{shown}{after}")
