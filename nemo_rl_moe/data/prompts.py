# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts of GRPO: reading or sampling, tokenization, removal of repeats, and the prompts of each step."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from nemo_rl_moe.config.environments.rewards import ReasoningGymConfig
from nemo_rl_moe.config.schema_environment import EnvironmentConfig
from nemo_rl_moe.config.schema_grpo import PromptDataConfig, PromptSourceConfig
from nemo_rl_moe.data.chat_template import prompt_renderer_for
from nemo_rl_moe.data.dataset import DataReport, ItemKind, ItemSize, ReportWords, counted_notes, read_items
from nemo_rl_moe.data.encoding import encode_each, most_characters
from nemo_rl_moe.data.image_files import StoredImage
from nemo_rl_moe.data.image_tokens import ImageTokenizer, RecordImages, SampleImages, batch_inputs, num_images_of
from nemo_rl_moe.data.loader import epoch_order
from nemo_rl_moe.data.messages import Message
from nemo_rl_moe.data.prompt_records import PromptRecord, apply_template, prompt_columns, prompt_parser
from nemo_rl_moe.data.records import BadLine
from nemo_rl_moe.data.repeats import RepeatFilter, digest_of, what_is_read
from nemo_rl_moe.data.shared_records import SharedRecords
from nemo_rl_moe.data.sources import TEXT_SUFFIX, LineSource, open_lines, open_text
from nemo_rl_moe.data.template_inputs import NO_INPUTS, TemplateInputs, run_wide_inputs
from nemo_rl_moe.data.template_renderer import Rendered
from nemo_rl_moe.distributed.batch import ModelInput
from nemo_rl_moe.errors import ConfigurationError, DataError, counted
from nemo_rl_moe.rewards.reasoning_gym import draw_items

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prompt:
    """One prompt, tokenized.

    Attributes:
        sample_id: `file:line`, `dataset[split]:row`, or `task[seed 0]:item`.
        text: The prompt without the chat template's additions.
        record: The data's record. It always has `question` and `answer`.
        images: None if the model is text-only.
        environment: Name in `env.mixture`. Empty without a mixture.
        read: Digest of the part of the record that code may read (`what_is_read`).
    """

    sample_id: str
    text: str
    token_ids: tuple[int, ...]
    record: Mapping[str, Any]
    images: SampleImages | None = None
    notes: tuple[str, ...] = ()
    messages: tuple[Message, ...] = ()
    inputs: TemplateInputs = NO_INPUTS
    environment: str = ""
    read: bytes = b""

    def identity(self) -> tuple[object, ...]:
        """Return a value that is equal for two prompts if neither the model nor code that reads the record can
        distinguish them."""
        return self.token_ids, self.images.digests() if self.images is not None else (), self.read


def prompt_inputs(prompts: Sequence[Prompt]) -> list[dict[str, ModelInput]]:
    """Return the model's inputs besides tokens for each prompt, which are empty for a text-only model. Each image is
    decoded once."""
    return batch_inputs([(prompt.images, len(prompt.token_ids)) for prompt in prompts])


WORDS = ReportWords("prompt", None, "longer than a prompt may be")


class PromptDataset(Sequence[Prompt]):
    def __init__(self, prompts: Sequence[Prompt], report: DataReport):
        self.report = report
        self._prompts = tuple(prompts)

    def __len__(self) -> int:
        return len(self._prompts)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        return self._prompts[index]


def load_prompts(
    source: PromptSourceConfig,
    data: PromptDataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    max_prompt_length: int,
    env: EnvironmentConfig | None,
    images: ImageTokenizer | None = None,
    environment: str = "",
    shared: SharedRecords | None = None,
    response_key: str | None = None,
    own: LineSource[PromptRecord] | None = None,
) -> PromptDataset:
    """Read one set of prompts, or sample it from the environment's task. Tokenize and return it.

    Repeated prompts with the same answer are dropped and counted. If prompts are sampled, a repeated one is replaced by
    a sample with another seed. Each item is sampled with its own seed. Sets with different values of `seed` have no
    item's seed in common, but may have equal questions by chance, in particular if the task has few questions (see
    `without_training_prompts`).

    Args:
        max_prompt_length: Maximum number of tokens. Longer prompts are dropped and counted.
        env: The environment, whose task samples prompts and whose reward determines what records must have. None:
            responses are not scored, repeated prompts stay, and records need no answer.
        images: None if the model is text-only.
        environment: Name in `env.mixture`. Empty without a mixture.
        shared: Finds the records of this environment if environments share the data. None: they do not.
        response_key: Key of the response in each record. None: records have no response.
        own: Prompts that the environment itself provides, as a library's environment does. They are read instead of
            `source`. None: `source` is read.
    """
    num_resampled = 0
    if own is not None:
        lines = own
    elif source.path is None:
        lines, num_resampled = _sampled(source, data, env)
    else:
        lines = _read(source.path, source, data, env, environment, shared)
    repeats = RepeatFilter(env, response_key) if env is not None else None
    kind = ItemKind(
        WORDS,
        _prompt_tokenizer(
            tokenizer,
            max_prompt_length,
            run_wide_inputs(data.tools, data.chat_template_kwargs),
            RecordImages(data.image_key, images),
            env,
        ),
        lambda prompt: ItemSize(
            prompt.sample_id,
            len(prompt.token_ids),
            num_images=num_images_of(prompt.images),
            notes=prompt.notes,
            is_dropped=len(prompt.token_ids) > max_prompt_length,
        ),
        lambda dropped: (
            f"{dropped} longer than {max_prompt_length} tokens, which is "
            "policy.max_total_sequence_length less policy.generation.max_new_tokens"
        ),
    )
    kept = repeats.first_of_each(lines.lines) if repeats is not None else lines.lines
    prompts, report = read_items(replace(lines, lines=islice(kept, source.num_items)), kind, data.on_bad_line)
    if repeats is not None:
        num_resampled += repeats.num_repeated
        report = replace(report, first_repeated=repeats.first)
    if environment:
        prompts = [replace(prompt, environment=environment) for prompt in prompts]
        report = replace(report, name=f"{environment}: {report.name}")
    return PromptDataset(prompts, replace(report, num_repeated=num_resampled))


class PromptLoader:
    """Yields the prompts of each step. With shuffling, each epoch has a new order.

    The order only depends on the seed and the epoch. An epoch skips the last prompts if they do not fill a step. With
    shuffling, each epoch skips different prompts.
    """

    def __init__(self, dataset: Sequence[Prompt], num_prompts_per_step: int, seed: int, shuffle: bool):
        if len(dataset) < num_prompts_per_step:
            raise DataError(
                f"grpo.num_prompts_per_step: got {num_prompts_per_step}, but the training data has only "
                f"{counted(len(dataset), 'prompt')} that can be used"
            )
        self._dataset = dataset
        self._num_prompts_per_step = num_prompts_per_step
        self._seed = seed
        self._shuffle = shuffle

    def __len__(self) -> int:
        """Return the number of steps of one epoch."""
        return len(self._dataset) // self._num_prompts_per_step

    def epoch(self, epoch_index: int) -> Iterator[list[Prompt]]:
        """Yield the prompts of each step of an epoch. Epochs are counted from 0."""
        order = epoch_order(len(self._dataset), self._seed, epoch_index, shuffle=self._shuffle)
        for step in range(len(self)):
            chosen = order[step * self._num_prompts_per_step :][: self._num_prompts_per_step]
            yield [self._dataset[index] for index in chosen]


def _read(
    path: str,
    source: PromptSourceConfig,
    data: PromptDataConfig,
    env: EnvironmentConfig | None,
    environment: str,
    shared: SharedRecords | None,
) -> LineSource[PromptRecord]:
    parse = prompt_parser(data, env)
    if path.endswith(TEXT_SUFFIX):
        return open_text(path, data.prompt_key, parse)
    if shared is None:
        return open_lines(path, source.split, parse, prompt_columns(data, env))
    opened = open_lines(path, source.split, shared.parser(environment, parse), prompt_columns(data, env))
    return LineSource(opened.name, opened.num_lines, shared.own(opened.lines))


def _sampled(
    source: PromptSourceConfig, data: PromptDataConfig, env: EnvironmentConfig | None
) -> tuple[LineSource[PromptRecord], int]:
    """Sample prompts from the task, and return them with the number of repeats among the samples."""
    task = env.reward if env is not None else None
    if not isinstance(task, ReasoningGymConfig) or source.num_items is None:
        raise ConfigurationError(
            "data: if path is null, prompts are sampled from a task, which needs env.reward.kind reasoning_gym and"
            " num_items"
        )
    sampled = draw_items(task, source.num_items, source.seed)
    name = f"{task.task}[seed {source.seed}]"
    records = [
        PromptRecord(
            sample_id=f"{name}:{index}",
            messages=apply_template([{"role": "user", "content": item["question"]}], data.prompt_template),
            is_text=True,
            record={key: item[key] for key in ("question", "answer", "metadata")},
        )
        for index, item in sampled.items
    ]
    return LineSource(name, len(records), iter(records)), sampled.num_repeated


def _prompt_tokenizer(
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int,
    run_wide: TemplateInputs,
    images: RecordImages,
    env: EnvironmentConfig | None,
) -> Callable[[Sequence[PromptRecord]], list[Prompt | BadLine]]:
    render = prompt_renderer_for(tokenizer, run_wide)

    def encode(texts: Sequence[str]) -> list[list[int]]:
        # The rendered text already has the special tokens.
        encoding: Any = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        return list(encoding["input_ids"])

    def tokenize(records: Sequence[PromptRecord]) -> list[Prompt | BadLine]:
        rendered = images.check(records, render(records))
        # A prompt that is much too long is dropped anyway.
        most = most_characters(max_length)
        texts = [item[0].text[:most] for item in rendered if not isinstance(item, str)]
        encoded = iter(encode_each(encode, texts, len))
        return [
            BadLine(record.sample_id, item)
            if isinstance(item, str)
            else _finish(record, item[0], next(encoded), max_length, images, item[1], env)
            for record, item in zip(records, rendered, strict=True)
        ]

    return tokenize


def _finish(
    prompt: PromptRecord,
    rendered: Rendered,
    encoded: list[int] | str,
    max_length: int,
    images: RecordImages,
    stored: tuple[StoredImage, ...],
    env: EnvironmentConfig | None,
) -> Prompt | BadLine:
    if isinstance(encoded, str):
        return BadLine(prompt.sample_id, encoded)
    if len(rendered.text) > most_characters(max_length) and len(encoded) <= max_length:
        return BadLine(prompt.sample_id, f"the prompt has {len(rendered.text):,} characters, too many to be tokenized")
    if not encoded:
        return BadLine(prompt.sample_id, "the prompt has no token to start from")
    ids, shown = tuple(encoded), None
    if images.tokens is not None:
        expanded = images.tokens.expand(np.array(encoded, dtype=np.int64), stored, max_length, prompt.sample_id)
        if isinstance(expanded, str):
            return BadLine(prompt.sample_id, expanded)
        ids, shown = tuple(expanded.input_ids.tolist()), expanded.images
    return Prompt(
        prompt.sample_id,
        prompt.text,
        ids,
        prompt.record,
        shown,
        rendered.notes,
        prompt.messages,
        prompt.inputs,
        read=b"" if env is None else digest_of(what_is_read(prompt, env)),
    )


def without_training_prompts(held_out: PromptDataset, training: Iterable[Prompt]) -> PromptDataset:
    """Return the held-out prompts without those that equal a training prompt. The report counts them.

    Answers are not compared, since the model has been trained on the question.
    """
    wanted = {prompt.identity() for prompt in held_out}
    shared = {identity: prompt.sample_id for prompt in training if (identity := prompt.identity()) in wanted}
    if not shared:
        return held_out
    first = next(prompt for prompt in held_out if prompt.identity() in shared)
    kept = [prompt for prompt in held_out if prompt.identity() not in shared]
    if not kept:
        raise DataError(
            f"data.validation: each of the {counted(len(held_out), 'prompt')} of {held_out.report.name} is a training "
            "prompt too; set data.validation to held-out data or to null"
        )
    report = replace(
        held_out.report,
        num_kept=len(kept),
        num_tokens=sum(len(prompt.token_ids) for prompt in kept),
        num_images=None if held_out.report.num_images is None else sum(num_images_of(p.images) or 0 for p in kept),
        num_training_prompts=len(held_out) - len(kept),
        first_training_prompt=f"{first.sample_id}, as {shared[first.identity()]}",
        notes=counted_notes((prompt.sample_id, prompt.notes) for prompt in kept),
    )
    return PromptDataset(kept, report)
