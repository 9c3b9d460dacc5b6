# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The `lora` section of a trained model: low-rank adapters of frozen weights (Hu et al. 2021, LoRA)."""

import math
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
    "in_proj_qkvz",
    "in_proj_ba",
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_b",
    "in_proj_a",
    "out_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "router",
]
MLP_TARGETS = ("gate_proj", "up_proj", "down_proj")
Rank = Annotated[int, Field(gt=0, le=4096)]
Alpha = Annotated[float, Field(gt=0, le=1_000_000)]


def lora_scale(alpha: float, rank: float, *, use_rslora: bool) -> float:
    """Return the factor of the product `B A` of matrices of this rank."""
    return alpha / (math.sqrt(rank) if use_rslora else rank)


class LoraConfig(StrictModel):
    """Low-rank adapters of frozen weights. Only the adapters are trained and saved: `W x + scale * B A x`, with `A`
    `[rank, inputs]` and `B` `[outputs, rank]`."""

    rank: Rank
    """Number of rows of `A` and of columns of `B`."""
    alpha: Alpha
    """Numerator of the scale, which multiplies the product `B A`."""
    use_rslora: bool
    """Denominator of the scale. false: `rank`. true: the square root of `rank` (rank-stabilized LoRA)."""
    targets: Annotated[list[LoraTarget], Field(min_length=1)]
    """Layers with an adapter, by the names of their modules in transformers. `all-linear`: all linear layers except
    routers and the output layer. gate_proj, up_proj and down_proj apply to dense layers, shared experts and, depending
    on `experts`, routed experts."""
    dropout: UnitFloat
    """Share of an adapter's inputs that training sets to zero."""
    experts: Literal["per_expert", "shared", "none"]
    """Adapters of routed experts. per_expert: an adapter for each expert. shared: an adapter that all routed experts of
    a layer share. none: no adapters."""
    init: Literal["kaiming", "gaussian"]
    """Initial values of `A`. kaiming: uniform, as in a linear layer. gaussian: normal with standard deviation `1 /
    rank`. `B` is zero at first, so that training begins with the unchanged model."""
    path: PathText | None
    """Folder of the adapter to begin with, of peft or of a run (`final/adapter`). null: a new adapter."""

    @property
    def scale(self) -> float:
        """Factor of the product `B A`."""
        return lora_scale(self.alpha, self.rank, use_rslora=self.use_rslora)
