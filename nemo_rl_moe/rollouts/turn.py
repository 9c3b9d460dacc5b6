# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Responses of the model in a trajectory, and their seeds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from xxhash import xxh3_64_intdigest

from nemo_rl_moe.generation.interface import GeneratedSequence, SamplingParameters, TokenIds


@dataclass(frozen=True)
class Turn:
    """One response of the model.

    Attributes:
        token_ids: Its sampled tokens, with the end token if it has one.
        text: Text of the response, without the end token.
        is_truncated: Whether it was truncated at the run's limit on tokens.
        logprobs: Log-probability of each of its tokens, in nats.
        is_cut: Whether it was truncated at the run's limit or at the limit of its request.
    """

    token_ids: TokenIds
    text: str
    is_truncated: bool
    logprobs: tuple[float, ...] = ()
    is_cut: bool = False


@dataclass(frozen=True)
class SampledResponse:
    """A response that belongs to no sequence of its trajectory yet.

    Attributes:
        prompt_ids: The tokens that it continues.
        found: The response as the engine returned it.
        asked_s: Time of the request, in seconds since the start of the trajectory.
    """

    turn: Turn
    prompt_ids: TokenIds
    found: GeneratedSequence
    asked_s: float


def response_text(token_ids: TokenIds, sampling: SamplingParameters, decode: Callable[[Sequence[int]], str]) -> str:
    """Return a response as text, without the token that ended it."""
    if token_ids and token_ids[-1] in sampling.stop_token_ids:
        token_ids = token_ids[:-1]
    return decode(token_ids)


def seed_of_turn(seed: int, turn: int) -> int:
    """Return the seed of a turn: the trajectory's for turn 0, and for later turns one that no other trajectory has."""
    if turn == 0:
        return seed
    return int(np.random.SeedSequence([seed, turn]).generate_state(1, np.uint64)[0])


def seed_of_tokens(seed: int, token_ids: Sequence[int], number: int) -> int:
    """Return the seed of a response to some tokens, which does not depend on the order of requests.

    Args:
        seed: The trajectory's seed.
        number: Number of earlier requests of the trajectory with the same tokens.
    """
    digest = xxh3_64_intdigest(np.asarray(token_ids, dtype=np.int64).tobytes())
    # Another spawn key than those of turns and of interrupted responses.
    numbers = np.random.SeedSequence([seed, digest, number], spawn_key=(2,))
    return int(numbers.generate_state(1, np.uint64)[0])
