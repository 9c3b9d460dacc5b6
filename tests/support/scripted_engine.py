# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""An engine that takes requests as they come, in virtual time, and whose tokens show the weights that sampled them."""

import asyncio
from dataclasses import dataclass, field

import numpy as np

from nemo_rl_moe.data.prompts import PromptLoader
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationEngine, GenerationRequest
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.weight_sync.transport import WeightTransport
from tests.support.grpo_fakes import END_TOKEN, prompts


@dataclass
class ScriptedEngine(GenerationEngine):
    """Samples one token after the other; each depends on its seed, its place and the weights at its time.

    Attributes:
        token_s: Seconds of a token.
        version: Optimizer steps of the weights.
        seeds: Of all requests.
    """

    token_s: float = 0.0
    version: int = 0
    shares_weights: bool = False
    seeds: list[int] = field(default_factory=list)

    async def generate(self, request: GenerationRequest) -> GeneratedSequence:
        self.seeds.append(request.seed)
        token_ids, versions = list[int](), list[int]()
        for place in range(2 + request.seed % 4):
            await asyncio.sleep(self.token_s)
            token_ids.append(5 + (request.seed // 10**place + 3 * self.version) % 10)
            versions.append(self.version)
        token_ids, versions = [*token_ids, END_TOKEN], [*versions, self.version]
        return GeneratedSequence(np.array(token_ids), np.full(len(versions), -0.25), False, np.array(versions))

    def update_weights(self, transport: WeightTransport, version: int) -> None:
        raise AssertionError("the script says which weights there are")


class TwoTurns:
    """Asks twice."""

    async def rollout(self, session: Session) -> Trajectory:
        await session.generate()
        session.append([7, 8])
        await session.generate()
        return session.finish(await session.score())


def loader() -> PromptLoader:
    """Return rounds of two of seven prompts."""
    return PromptLoader(prompts(7), 2, seed=3, shuffle=True)
