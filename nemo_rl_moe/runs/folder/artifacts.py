# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Names of the arrays that a training step produces besides its metrics. Ranks import this module: it must be light."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

if TYPE_CHECKING:
    from nemo_rl_moe.routing.agreement.statistics import RoutingReport
    from nemo_rl_moe.routing.metrics.load_statistics import ExpertLoad
    from nemo_rl_moe.routing.metrics.routing_advantage import AdvantageScores
    from nemo_rl_moe.routing.metrics.writers import WriterLoad
    from nemo_rl_moe.runs.folder.by_lag import LagTable
    from nemo_rl_moe.runs.folder.time_line import TimeLine

Artifact = TypeVar("Artifact")
StepArtifacts = Mapping[str, Any]
"""`ArtifactKey.name` -> array or table of one step."""


@dataclass(frozen=True)
class ArtifactKey(Generic[Artifact]):
    name: str

    def of(self, artifacts: StepArtifacts) -> Artifact | None:
        return cast("Artifact | None", artifacts.get(self.name))


EXPERT_LOAD: "ArtifactKey[ExpertLoad]" = ArtifactKey("expert_load")
ROUTING: "ArtifactKey[RoutingReport]" = ArtifactKey("routing")
EXPERTS_BY_ADVANTAGE: "ArtifactKey[AdvantageScores]" = ArtifactKey("experts_by_advantage")
EXPERTS_BY_WRITER: "ArtifactKey[WriterLoad]" = ArtifactKey("experts_by_writer")
BY_LAG: "ArtifactKey[LagTable]" = ArtifactKey("by_lag")
TIME_LINE: "ArtifactKey[TimeLine]" = ArtifactKey("time_line")
