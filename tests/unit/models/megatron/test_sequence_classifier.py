# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Folders of transformers' sequence classifiers: their score is the value behind the last token, in any layout."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.hf_files import load_hf_config, plain_config
from nemo_rl_moe.models.interfaces import Head
from nemo_rl_moe.models.megatron.training.measurements import prefix_values, sequence_scores
from nemo_rl_moe.models.megatron.training.trainer import MegatronModel
from tests.support.family_models import FAMILY_MODELS
from tests.support.family_reference import save_model, token_ids
from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import full
from tests.support.tiny_model import layout, parallel_job, tiny_batch, tiny_policy
from tests.unit.models.megatron.tiny_trainers import PACKED, shard_for

FAMILIES = ("llama", "mixtral", "qwen2_moe", "qwen3_tied", "qwen3_moe", "deepseek_v3", "gpt_oss")
"""Of each kind of layers one, with untied and tied embeddings."""
COLUMNS = 12


def write_classifier(name: str, folder: Path, num_labels: int = 1) -> Any:
    """Write a classifier with random weights; return transformers' model."""
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(5)
    family_model = FAMILY_MODELS[name]
    config = family_model.transformers_config()
    config.num_labels, config.pad_token_id = num_labels, 0
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5)
    save_model(model, folder)
    fields = {**family_model.config_json(), "architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(fields))
    return model.eval()


def scores_of_folders(policy: PolicyConfig, folders: Sequence[str], by_length: bool) -> list[dict[int, float]]:
    """Return the score of each row, on ranks that report; every rank of a job calls it.

    By length: of sequences of different lengths; else the value behind the last token of rows of the same length.
    """
    found = []
    with parallel_job(policy):
        for folder in folders:
            hf_config = plain_config(load_hf_config(folder))
            model = MegatronModel(policy, hf_config, Path(folder), heads=(Head.VALUE,))
            if by_length:
                scores = model.measure(
                    shard_for(model, tiny_batch(4, hf_config.vocab_size)).microbatches, sequence_scores
                )
                rows = [float(score) for of_rows in scores for (score,) in of_rows]
            else:
                batch = tiny_batch(3, hf_config.vocab_size, shortest=COLUMNS, longest=COLUMNS)
                batch = replace(batch, input_ids=batch.input_ids.clamp(min=1))  # transformers would look before padding
                values = model.measure(shard_for(model, batch).microbatches, prefix_values)
                rows = [float(each[COLUMNS - 1]) for of_rows in values for each in of_rows]
            first = model.coordinates.data_parallel_rank * (8 // model.coordinates.data_parallel_size)
            found.append({first + row: score for row, score in enumerate(rows)})
    return found


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Folders, with transformers' scores of all but the last token of each row."""
    found = {}
    for name in FAMILIES:
        folder = tmp_path_factory.mktemp(name)
        model = write_classifier(name, folder)
        ids = token_ids(model.config.vocab_size).clamp(min=1)
        with torch.no_grad():
            found[str(folder)] = model(ids[:, : COLUMNS - 1]).logits[:, 0].numpy()
    return found


@pytest.mark.parametrize(
    ("world_size", "changes"), [(1, {}), full(1, PACKED), full(2, layout(tp=2)), full(2, layout(pp=2))]
)
def test_scores_are_those_of_transformers(
    world_size: int, changes: dict[str, Any], classifiers: dict[str, np.ndarray]
) -> None:
    folders = list(classifiers)
    by_rank = run_ranks(scores_of_folders, world_size, tiny_policy(world_size, **changes), folders, False)
    for number, folder in enumerate(folders):
        rows = {row: score for rank in by_rank for row, score in rank[number].items()}
        found = [rows[row] for row in range(8)]
        np.testing.assert_allclose(found, classifiers[folder], rtol=2e-4, atol=2e-5, err_msg=folder)


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [(1, {}), (1, PACKED), (2, layout(tp=2)), full(2, layout(tp=2) | PACKED), full(2, layout(pp=2)), full(2, {})],
)
def test_scores_of_sequences_of_different_lengths(
    world_size: int, changes: dict[str, Any], classifiers: dict[str, np.ndarray]
) -> None:
    from transformers import AutoModelForSequenceClassification

    folders = list(classifiers)
    by_rank = run_ranks(scores_of_folders, world_size, tiny_policy(world_size, **changes), folders, True)
    for number, folder in enumerate(folders):
        rows = {row: score for rank in by_rank for row, score in rank[number].items()}
        reference = AutoModelForSequenceClassification.from_pretrained(
            folder, num_labels=1, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        batch = tiny_batch(4, reference.config.vocab_size)
        assert len(set(batch.lengths.tolist())) > 3
        with torch.no_grad():
            expected = [
                reference(batch.input_ids[row : row + 1, :length]).logits.item()
                for row, length in enumerate(batch.lengths.tolist())
            ]
        np.testing.assert_allclose([rows[row] for row in range(8)], expected, rtol=1e-5, atol=1e-5, err_msg=folder)


def problem_of(policy: PolicyConfig, folder: str, heads: Sequence[Head]) -> str:
    with parallel_job(policy):
        try:
            MegatronModel(policy, plain_config(load_hf_config(folder)), Path(folder), heads=heads)
        except ConfigurationError as error:
            return str(error)
    return ""


def test_classifiers_of_another_form_are_refused(tmp_path: Path) -> None:
    write_classifier("qwen3_moe", tmp_path / "three", num_labels=3)
    (said,) = run_ranks(problem_of, 1, tiny_policy(1), str(tmp_path / "three"), (Head.VALUE,))
    assert "score.weight (got [3, 32], expected [1, 32])" in said
    write_classifier("qwen3_moe", tmp_path / "one")
    (said,) = run_ranks(problem_of, 1, tiny_policy(1), str(tmp_path / "one"), (Head.LOGPROBS,))
    assert "that the model has no place for: score.weight" in said
    names = [name for file in (tmp_path / "one").glob("*.safetensors") for name in load_file(file)]
    assert "lm_head.weight" not in names
