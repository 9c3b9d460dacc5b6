# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tiny models whose indexers choose tokens: what transformers chooses, and what a run generates and captures."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import TokenBatch, stored_per_token
from nemo_rl_moe.distributed.stored_rows import StoredRows
from nemo_rl_moe.generation.interface import GenerationBatch, SamplingParameters
from nemo_rl_moe.routing.indexer_replay import INDEXER_POSITIONS
from nemo_rl_moe.routing.replay import UNKNOWN
from tests.support.family_models import FAMILY_MODELS
from tests.support.family_reference import PROMPTS, trainer_of
from tests.support.tiny_model import parallel_job, tiny_grpo_policy

MODELS = ("deepseek_v32_sparse", "glm_moe_dsa_sparse")
TOPK = 4
NUM_NEW = 9


def policy_of(world_size: int = 1, **changes: Any) -> Any:
    # A loss of balance is not transformers'.
    given = {"indexer_replay": "rollout", "moe_aux_loss_coeff": 0.0, "max_grad_norm": None, **changes}
    return tiny_grpo_policy(world_size, **given)


def layers_of(name: str) -> list[int]:
    """Return the layers with an indexer."""
    kinds = FAMILY_MODELS[name].fields.get("indexer_types", ["full"] * 4)
    return [layer for layer, kind in enumerate(kinds) if kind == "full"]


def with_positions(batch: TokenBatch, rows: list[np.ndarray]) -> TokenBatch:
    column = stored_per_token([StoredRows.of(each) for each in rows], fill=UNKNOWN)
    assert column is not None
    return batch.with_stored(INDEXER_POSITIONS, column)


@contextmanager
def choosing(model: nn.Module, rows: np.ndarray | None, seen: list[Tensor] | None = None) -> Iterator[None]:
    """Let transformers' indexers take the given positions of one sequence, or show their own."""
    indexers = [module for module in model.modules() if type(module).__name__.endswith("Indexer")]

    def given(layer: int) -> Callable[..., Tensor]:
        own = indexers[layer].forward

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            chosen = own(*args, **kwargs)
            if seen is not None:
                seen.append(chosen)
            if rows is None:
                return chosen
            chosen = chosen.clone()
            positions = torch.from_numpy(rows[:, layer])
            # A token that sees fewer names one several times.
            chosen[0, : len(rows)] = torch.where(positions < 0, positions[:, :1], positions)
            return chosen

        return forward

    with ExitStack() as stack:
        for layer, indexer in enumerate(indexers):
            stack.enter_context(mock.patch.object(indexer, "forward", given(layer)))
        yield


# The first prompt twice: its passes are shared.
REQUEST = (*PROMPTS, PROMPTS[0])
SAMPLING = SamplingParameters(max_new_tokens=NUM_NEW, temperature=1.0, stop_token_ids=(5, 17, 40, 12))


@dataclass(frozen=True)
class Generated:
    """A sequence with its log-probabilities, 0 for the prompt, and what was captured of each token but the last."""

    token_ids: list[int]
    logprobs: np.ndarray
    positions: np.ndarray
    experts: np.ndarray


def generated(trainer: Any) -> list[Generated]:
    request = GenerationBatch(REQUEST, tuple(range(len(REQUEST))), SAMPLING)
    found = []
    for prompt, sequence in zip(REQUEST, trainer.generate(request, max_batch_size=None), strict=False):
        assert sequence.indexer_positions is not None
        positions, experts = (rows.pieces[0].source for rows in (sequence.indexer_positions, sequence.routed_experts))
        logprobs = np.concatenate([np.zeros(len(prompt), np.float32), sequence.logprobs])
        found.append(Generated([*prompt, *sequence.token_ids.tolist()], logprobs, positions, experts))
    return found


def generate(folder: str, policy: PolicyConfig) -> list[Generated]:
    """Run on every rank: the sequences on ranks that report them."""
    with parallel_job(policy):
        return generated(trainer_of(Path(folder), policy))
