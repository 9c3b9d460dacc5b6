# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Linear layers, cut among tensor-parallel ranks or not, and with a norm in front."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from transformer_engine.pytorch.distributed import enter_columns, leave_rows
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule, mark_as_cut, new_parameter
from transformer_engine.pytorch.module.norms import normalize


class Linear(TransformerEngineBaseModule):
    """A linear layer.

    Args:
        in_features: Inputs of the whole layer.
        out_features: Outputs of the whole layer.
        parallel_mode: `column` cuts the outputs, `row` the inputs, None nothing; the weight is marked as cut in any
            case, along its first axis unless it is `row`.
        return_bias: Hand the bias to the caller in place of adding it.
    """

    def __init__(
        self,
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
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ):
        super().__init__()
        if fuse_wgrad_accumulation or delay_wgrad_compute:
            raise NotImplementedError("weight gradients are torch's here")
        if parallel_mode not in (None, "column", "row"):
            raise ValueError(f"parallel_mode: got {parallel_mode!r}")
        self.tp_group, self.tp_size, self.parallel_mode = tp_group, tp_size, parallel_mode
        self.in_features = in_features // tp_size if parallel_mode == "row" else in_features
        self.out_features = out_features // tp_size if parallel_mode == "column" else out_features
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        self.save_original_input = False
        made = {
            "dtype": params_dtype or torch.get_default_dtype(),
            "device": device,
            "get_rng_state_tracker": get_rng_state_tracker,
            "rng_tracker_name": rng_tracker_name,
        }
        init_method = init_method or (lambda weight: nn.init.normal_(weight, std=0.023))
        self.weight = new_parameter(self.out_features, self.in_features, init_method=init_method, **made)
        mark_as_cut(self.weight, 1 if parallel_mode == "row" else 0)
        if bias:
            self.bias = new_parameter(self.out_features, init_method=nn.init.zeros_, **made)
            if parallel_mode == "row":
                self.bias.sequence_parallel = self.sequence_parallel
            elif parallel_mode == "column":
                mark_as_cut(self.bias, 0)
        else:
            self.bias = torch.empty(0, dtype=made["dtype"])

    def _product(self, inputs: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        is_cut = self.parallel_mode is not None and self.tp_size > 1
        if is_cut and self.parallel_mode == "column":
            inputs = enter_columns(inputs, self.tp_group, sequence_parallel=self.sequence_parallel)
        added = self.bias if self.apply_bias and self.parallel_mode != "row" else None
        found = F.linear(inputs, self.weight, added)
        if is_cut and self.parallel_mode == "row":
            found = leave_rows(found, self.tp_group, sequence_parallel=self.sequence_parallel)
        if self.apply_bias and self.parallel_mode == "row":
            found = found + self.bias
        return (found, self.bias) if self.return_bias else found

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """`[..., inputs]` to `[..., outputs]`, with the bias beside it where that is returned."""
        if inp.shape[-1] != self.in_features:
            raise AssertionError("GEMM not possible")
        return self._product(inp)


class LayerNormLinear(Linear):
    """A norm and a linear layer that is cut along its outputs; the norm's weight is `layer_norm_weight`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        params_dtype: torch.dtype | None = None,
        device: Any = "cuda",
        **kwargs: Any,
    ):
        super().__init__(in_features, out_features, params_dtype=params_dtype, device=device, **kwargs)
        if return_layernorm_output or self.parallel_mode != "column":
            raise NotImplementedError("Megatron-Core builds none like that")
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        fill = torch.zeros if zero_centered_gamma else torch.ones
        self.layer_norm_weight = nn.Parameter(fill(in_features, dtype=params_dtype, device=device))
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        self.layer_norm_bias: nn.Parameter | None = None
        if normalization == "LayerNorm":
            self.layer_norm_bias = nn.Parameter(torch.zeros(in_features, dtype=params_dtype, device=device))
            self.layer_norm_bias.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """`[..., inputs]` to `[..., outputs]`, with the bias beside it where that is returned."""
        weight, bias = self.layer_norm_weight, self.layer_norm_bias
        return self._product(normalize(self.normalization, inp, weight, bias, self.eps, self.zero_centered_gamma))
