# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The products of a layer's experts in one call."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from transformer_engine.pytorch.module.base import TransformerEngineBaseModule, mark_as_cut, new_parameter


class GroupedLinear(TransformerEngineBaseModule):
    """Linear layers `weight0`, `weight1`, ...; each takes its share of the rows. It sends nothing to other ranks.

    Weights are marked as cut whatever `parallel_mode` is, biases only where it says so.
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        name: str | None = None,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
    ):
        super().__init__()
        if single_grouped_weight or single_grouped_bias:
            raise NotImplementedError("experts in one tensor")
        if fuse_wgrad_accumulation or delay_wgrad_compute:
            raise NotImplementedError("weight gradients are torch's here")
        if tp_size > 1 and bias:
            raise ValueError("GroupedLinear doesn't support bias when TP > 1")
        self.num_gemms, self.parallel_mode = num_gemms, parallel_mode
        self.in_features = in_features // tp_size if parallel_mode == "row" else in_features
        self.out_features = out_features // tp_size if parallel_mode == "column" else out_features
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        made = {
            "dtype": params_dtype or torch.get_default_dtype(),
            "device": device,
            "get_rng_state_tracker": get_rng_state_tracker,
            "rng_tracker_name": rng_tracker_name,
        }
        init_method = init_method or (lambda weight: nn.init.normal_(weight, std=0.023))
        for index in range(num_gemms):
            weight = new_parameter(self.out_features, self.in_features, init_method=init_method, **made)
            mark_as_cut(weight, 1 if parallel_mode == "row" else 0)
            self.register_parameter(f"weight{index}", weight)
        for index in range(num_gemms if bias else 0):
            added = new_parameter(self.out_features, init_method=nn.init.zeros_, **made)
            if parallel_mode == "row":
                added.sequence_parallel = self.sequence_parallel
            elif parallel_mode == "column":
                mark_as_cut(added, 0)
            self.register_parameter(f"bias{index}", added)

    def forward(
        self, inp: Tensor, m_splits: Sequence[int] | Tensor, is_first_microbatch: bool | None = None
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """`[rows, inputs]` to `[rows, outputs]`; `m_splits` says how many rows each layer takes."""
        rows = m_splits.tolist() if isinstance(m_splits, Tensor) else list(m_splits)
        if len(rows) != self.num_gemms:
            raise AssertionError("Number of splits should match number of GEMMs.")
        if sum(rows) != inp.shape[0]:
            raise AssertionError(f"{rows} do not add up to {inp.shape[0]} rows")
        biases = [getattr(self, f"bias{index}") for index in range(self.num_gemms)] if self.use_bias else []
        found = torch.cat(
            [
                F.linear(part, getattr(self, f"weight{index}"), biases[index] if self.apply_bias else None)
                for index, part in enumerate(inp.split(rows))
            ]
        )
        return (found, biases) if self.return_bias else found
