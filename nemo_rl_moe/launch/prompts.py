# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts of each environment of a run."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.config.schema_grpo import PromptSourceConfig
from nemo_rl_moe.config.schema_mixture import THE_ONLY_ONE
from nemo_rl_moe.data.mixture import interleaved
from nemo_rl_moe.data.prompts import Prompt, PromptDataset, load_prompts, without_training_prompts
from nemo_rl_moe.data.shared_records import SharedRecords
from nemo_rl_moe.data.sources import load_limit
from nemo_rl_moe.data.text_files import KIND_OF_SUFFIX
from nemo_rl_moe.errors import DataError
from nemo_rl_moe.launch.drivers.kinds import kind_of
from nemo_rl_moe.launch.drivers.setup import data_with_tools
from nemo_rl_moe.launch.setup import images_of_data
from nemo_rl_moe.models.image_rules import ImageRule
from nemo_rl_moe.runs.loggers.console import ConsoleLogger


def read_training_prompts(
    config: GRPOMasterConfig,
    tokenizer: Any,
    console: ConsoleLogger,
    *,
    image_rule: ImageRule | None,
    is_scored: bool = True,
) -> dict[str, PromptDataset]:
    """Read or sample the prompts to train on. Return name of an environment -> its prompts. See `read_prompts`."""
    found = {}
    shared = _shared_records(config)
    for name in config.env.environments:
        source = config.data.of(name).train
        try:
            found[name] = read_prompts(
                config,
                source,
                tokenizer,
                console,
                image_rule=image_rule,
                is_scored=is_scored,
                environment=name,
                shared=shared,
            )
        except DataError as error:
            if shared is None or not shared.lack(name):
                raise
            raise DataError(
                f"data.train.path: {source.path} has no record of the environment {name} (data.environment_key:"
                f" {config.data.environment_key})"
            ) from error
    return found


def read_held_out_prompts(
    config: GRPOMasterConfig,
    tokenizer: Any,
    console: ConsoleLogger,
    training: Mapping[str, PromptDataset],
    *,
    image_rule: ImageRule | None,
) -> Sequence[Prompt]:
    """Read or sample the held-out prompts, and return the prompts of all environments. Empty without validation."""
    found: dict[str, PromptDataset] = {}
    shared, lacking = _shared_records(config), list[str]()
    for name in config.env.environments:
        data = config.data.of(name)
        source = data.validation
        if config.data.validation is None or source is None:
            continue
        is_overfitting = is_same_file(data.train, source)
        if is_overfitting:
            console.message("validating with the training prompts: data.validation.path is data.train.path")
        left_out = () if is_overfitting else chain.from_iterable(training.values())
        try:
            found[name] = read_prompts(
                config, source, tokenizer, console, left_out, image_rule=image_rule, environment=name, shared=shared
            )
        except DataError:
            if shared is None or not shared.lack(name):
                raise
            lacking.append(name)
    if lacking and not found:
        path = "" if config.data.validation is None else config.data.validation.path
        raise DataError(f"data.validation.path: {path} has no record of {', '.join(lacking)}")
    if lacking:
        console.warn(
            f"data.validation.path: no record of {', '.join(lacking)}; validation uses the other environments only"
        )
    return found[THE_ONLY_ONE] if THE_ONLY_ONE in found else interleaved(found)


def _shared_records(config: GRPOMasterConfig) -> SharedRecords | None:
    """Return the object that finds each environment's records in shared data, or None if each environment has its own
    data."""
    if not config.env.mixture or config.data.environments:
        return None
    return SharedRecords(config.data.environment_key, tuple(config.env.mixture))


def read_prompts(
    config: GRPOMasterConfig,
    source: PromptSourceConfig,
    tokenizer: Any,
    console: ConsoleLogger,
    training: Iterable[Prompt] = (),
    *,
    image_rule: ImageRule | None,
    is_scored: bool = True,
    environment: str = THE_ONLY_ONE,
    shared: SharedRecords | None = None,
) -> PromptDataset:
    """Read or sample one set of prompts, remove the prompts `training` from it, tokenise it, and report skipped
    prompts.

    Args:
        image_rule: Rule by which the model reads images. None: a text-only model.
        is_scored: Whether responses are scored. If not, prompts need no answer, and repeated prompts are kept.
        environment: Name of the prompts' environment.
        shared: Object that finds the environment's records in shared data. None: the environment has its own data.
    """
    longest = config.policy.max_total_sequence_length - config.policy.generation.max_new_tokens
    settings = config.env.environments[environment]
    own = kind_of(settings.driver).prompts
    number = "the" if source.num_items is None else source.num_items
    what = f"reading {source.path}" if source.path else f"sampling {number} prompts"
    what += f" of the environment {environment}" if environment else ""
    with console.phase(what), load_limit(config.data.load_timeout_s, source.path or "sampled prompts"):
        images = images_of_data(config.data, source.path, tokenizer, image_rule)
        env = settings if is_scored else None
        data = data_with_tools(config, environment)
        key = config.given_response_key
        lines = None if own is None or source.path is not None else own(source)
        prompts = load_prompts(source, data, tokenizer, longest, env, images, environment, shared, key, lines)
        prompts = without_training_prompts(prompts, training)
    console.message(prompts.report.summary())
    return prompts


def is_same_file(training: PromptSourceConfig, validation: PromptSourceConfig) -> bool:
    """Return whether validation uses the training prompts on purpose, as a test of whether a run can memorise them.

    In other cases, held-out prompts that are also training prompts are an accident, and are skipped.
    """
    path = training.path
    if path is None or path != validation.path:
        return False
    return Path(path).suffix in KIND_OF_SUFFIX or training.split == validation.split
