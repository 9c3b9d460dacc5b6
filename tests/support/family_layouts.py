# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The layouts that every family is tried in."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from nemo_rl_moe.config.schema_policy import PolicyConfig
from tests.support.family_models import FamilyModel
from tests.support.tiny_model import layout, tiny_policy


@dataclass(frozen=True)
class Layout:
    """How a model is spread over ranks, and with which modules.

    Attributes:
        world_size: Number of ranks.
        sizes: As `tests.support.tiny_model.layout` has them.
        layer_spec: This project's modules, or Megatron-Core's own.
    """

    world_size: int = 1
    sizes: Mapping[str, int] = field(default_factory=dict)
    layer_spec: str = "auto"

    def holds(self, model: FamilyModel) -> bool:
        """Return whether the model can be spread like this."""
        chunks = self.sizes.get("pp", 1) * self.sizes.get("vpp", 1)
        cuts_experts = self.sizes.get("etp", 1) > 1
        return model.num_layers % chunks == 0 and (not cuts_experts or model.experts_can_be_cut)

    def policy(self, *, has_experts: bool) -> PolicyConfig:
        """Return the configuration; ranks that would share experts share the batch where there are none."""
        sizes = {name: size for name, size in self.sizes.items() if has_experts or name != "ep"}
        return tiny_policy(self.world_size, layer_spec=self.layer_spec, **layout(**sizes))


LAYOUTS: Mapping[str, Layout] = {
    "one_rank": Layout(),
    "one_rank_local": Layout(layer_spec="local"),
    "pp2_ep2": Layout(4, {"pp": 2, "ep": 2}),
    "dp2": Layout(2),
    "tp2": Layout(2, {"tp": 2}),
    "tp2_local": Layout(2, {"tp": 2}, "local"),
    "ep2": Layout(2, {"ep": 2}),
    "pp2": Layout(2, {"pp": 2}),
    "pp2_vpp2": Layout(2, {"pp": 2, "vpp": 2}),
    "tp2_etp2_local": Layout(2, {"tp": 2, "etp": 2}, "local"),
    "tp2_ep2_pp2": Layout(4, {"tp": 2, "ep": 2, "pp": 2}),
}
