# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The preference pairs of a run: how they are read, and the batches made of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from nemo_rl_moe.checkpoints.fingerprints import TRAINING_DATA, samples_fingerprint
from nemo_rl_moe.config.schema import PairMasterConfig
from nemo_rl_moe.config.schema_base import SupervisedLoopConfig
from nemo_rl_moe.config.schema_run import DataSourceConfig
from nemo_rl_moe.data.loader import GlobalBatchLoader, MakeBatch, sequential_batches, token_ids_and_images
from nemo_rl_moe.data.preferences import PreferenceDataset, collate_pairs, load_preferences
from nemo_rl_moe.data.tokenizer import pad_token_id
from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.launch.setup import PreparedModel, read_samples
from nemo_rl_moe.runs.loggers.console import ConsoleLogger


@dataclass(frozen=True)
class Pairs:
    """The preference pairs of a run, and functions that make batches of them.

    Attributes:
        schedule: The section of the algorithm's loop.
        validation: The held-out pairs. None: no validation.
    """

    config: PairMasterConfig
    schedule: SupervisedLoopConfig
    pad_token_id: int
    training: PreferenceDataset
    validation: PreferenceDataset | None
    make_batch: MakeBatch = collate_pairs

    @property
    def batch_size(self) -> int:
        """Number of pairs of a global batch."""
        return self.config.policy.train_global_batch_size

    def loader(self) -> GlobalBatchLoader:
        """Return the loader of training batches."""
        seed, shuffle = self.schedule.seed, self.config.data.shuffle
        return GlobalBatchLoader(self.training, self.batch_size, self.pad_token_id, seed, shuffle, self.make_batch)

    def validation_batches(self) -> Callable[[], Iterator[TokenBatch]] | None:
        """Return a function that makes one pass over the held-out batches, or None without validation data."""
        if self.validation is None:
            return None
        most = self.schedule.val_batches
        return partial(sequential_batches, self.validation, self.batch_size, self.pad_token_id, most, self.make_batch)

    def fingerprints(self) -> dict[str, str]:
        """Return the fingerprint of the training pairs, by which a resumed run notices that they have changed."""
        return {TRAINING_DATA: samples_fingerprint(self.config.data.train.path, _numbers_of(self.training))}


def read_pairs(
    config: PairMasterConfig,
    schedule: SupervisedLoopConfig,
    model: PreparedModel,
    console: ConsoleLogger,
    load: Callable[..., PreferenceDataset] = load_preferences,
    make_batch: MakeBatch = collate_pairs,
) -> Pairs:
    """Read and tokenize the pairs of a run.

    Args:
        load: `load_preferences`, or a function with the same arguments.
        make_batch: `collate_pairs`, or a function with the same arguments.
    """

    def read(source: DataSourceConfig) -> PreferenceDataset:
        return read_samples(load, config, source, model.tokenizer, console, model.image_rule, model.speech)

    training = read(config.data.train)
    held_out = None if config.data.validation is None else read(config.data.validation)
    return Pairs(config, schedule, pad_token_id(model.tokenizer), training, held_out, make_batch)


def _numbers_of(pairs: PreferenceDataset) -> Iterator[Any]:
    for pair in pairs:
        yield from token_ids_and_images((pair.chosen, pair.rejected))
        if pair.margin is not None:
            yield np.asarray([pair.margin]).view(np.int32)
