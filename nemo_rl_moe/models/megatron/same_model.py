# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Do all ranks see the same model? Each has looked for itself, maybe on a machine of its own."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.hf_files import holds_megatron_weights


def agree_on_model(config_json: Mapping[str, Any], folder: Path, *, with_weights: bool) -> None:
    """Every rank calls it before the first step that depends on what it has found: or some would wait for ever.

    Args:
        config_json: Content of the model's `config.json`, as this rank has read it.
        folder: The model's folder on this rank's machine.
        with_weights: Weights are going to be read from it.

    Raises:
        ConfigurationError: A rank has found something else than rank 0. The same on every rank.
    """
    digest = hashlib.sha256(json.dumps(config_json, sort_keys=True).encode()).hexdigest()
    form = "Megatron-Core's" if with_weights and holds_megatron_weights(folder) else "Hugging Face's"
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (digest, form, str(folder)))
    first_digest, first_form, first_folder = found[0]
    for rank, (of_rank, form_of_rank, folder_of_rank) in enumerate(found):
        where = f"policy.model_name: {folder_of_rank}: rank {rank} finds"
        if of_rank != first_digest:
            raise ConfigurationError(
                f"{where} another config.json than rank 0 ({first_folder}); all ranks must read the same model"
            )
        if form_of_rank != first_form:
            raise ConfigurationError(
                f"{where} weights in {form_of_rank} format, and rank 0 ({first_folder}) in {first_form}; all ranks "
                "must read the same model"
            )
