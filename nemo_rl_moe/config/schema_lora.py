# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The `policy.lora` section: low-rank adapters beside frozen weights (Hu et al. 2021, LoRA)."""

from typing import Annotated, Literal

from pydantic import Field

from nemo_rl_moe.config.schema_base import PathText, StrictModel, UnitFloat

ALL_LINEAR, ROUTER = "all-linear", "router"
LoraTarget = Literal[
    "all-linear",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "router",
]
MLP_TARGETS = ("gate_proj", "up_proj", "down_proj")
Rank = Annotated[int, Field(gt=0, le=4096)]
Alpha = Annotated[float, Field(gt=0, le=1_000_000)]


class LoraConfig(StrictModel):
    """Adapters beside frozen weights, which alone are trained and saved: `W x + alpha / rank * B A x`, with `A`
    `[rank, inputs]` and `B` `[outputs, rank]`."""

    rank: Rank
    """Columns of `B` and rows of `A`."""
    alpha: Alpha
    """The product counts `alpha / rank` times."""
    targets: Annotated[list[LoraTarget], Field(min_length=1)]
    """Layers that get one, by the names of their modules in transformers; `all-linear`: all but routers and the output
    layer. MLP names mean dense layers, shared experts and, with `experts`, routed ones."""
    dropout: UnitFloat
    """Share of the adapters' inputs that training sets to zero."""
    experts: Literal["per_expert", "shared", "none"]
    """Adapters of routed experts: one for each expert, one that all experts of a layer share, or none."""
    init: Literal["kaiming", "gaussian"]
    """Values of `A`: uniform as of a linear layer (kaiming), or normal with the deviation `1 / rank` (gaussian). `B`
    begins with zeros, so that training begins with the model as it is."""
    path: PathText | None
    """A folder with an adapter, of peft or of a run (`final/adapter`), that training or generation begins with; null:
    one that changes nothing."""

    @property
    def scale(self) -> float:
        """Factor of the product of the factors."""
        return self.alpha / self.rank
