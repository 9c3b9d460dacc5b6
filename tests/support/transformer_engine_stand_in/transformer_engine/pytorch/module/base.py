# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Layers with weights: norms, linear layers, and the products of a layer's experts in one call."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformer_engine.pytorch.distributed import enter_columns, leave_rows


class TransformerEngineBaseModule(nn.Module):
    """A module with an extra state, which without 8-bit formats is an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8 = self.fp8_calibration = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "recipe": None}

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Nothing."""

    def get_extra_state(self) -> Tensor:
        """Return the empty bytes."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        """Nothing, where there are no 8-bit formats."""
        if state is not None and state.numel():
            raise NotImplementedError("no 8-bit formats without a GPU")


def mark_as_cut(parameter: nn.Parameter, dimension: int) -> None:
    """Set the attributes that Megatron-Core knows a tensor-parallel parameter by."""
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    parameter.partition_dim = dimension  # type: ignore[attr-defined]
    parameter.partition_stride = 1  # type: ignore[attr-defined]


def new_parameter(
    *shape: int,
    dtype: torch.dtype,
    device: Any,
    init_method: Callable[[Tensor], Any],
    get_rng_state_tracker: Callable[[], Any] | None,
    rng_tracker_name: str | None,
) -> nn.Parameter:
    """Return a parameter with its first values, drawn from the random state that the caller names."""
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
    names = () if rng_tracker_name is None else (rng_tracker_name,)
    tracked = contextlib.nullcontext() if get_rng_state_tracker is None else get_rng_state_tracker().fork(*names)
    with tracked, torch.no_grad():
        init_method(parameter)
    return parameter


def get_workspace() -> None:
    """Memory for a product, which torch takes itself."""


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """Return a tensor in the place of a gradient that was added up elsewhere."""
    return torch.zeros(shape, dtype=dtype)


def normalize(
    kind: str, inputs: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered_gamma: bool
) -> Tensor:
    """`kind` is LayerNorm or RMSNorm; inputs `[..., hidden]`, in whose number format the result is."""
    scale = weight.float() + 1.0 if zero_centered_gamma else weight.float()
    wide = inputs.float()
    if kind == "LayerNorm":
        wide = wide - wide.mean(-1, keepdim=True)
    found = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * scale
    return (found if bias is None else found + bias.float()).to(inputs.dtype)


class RMSNorm(nn.Module):
    """A norm of its own. It offers a checkpoint an extra state, empty, as all fusible operations do."""

    kind = "RMSNorm"

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        device: Any = None,
    ):
        super().__init__()
        if (normalized_shape is None) == (hidden_size is None):
            raise RuntimeError("one of normalized_shape and hidden_size, its old name")
        width = normalized_shape if hidden_size is None else hidden_size
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        fill = torch.zeros if zero_centered_gamma else torch.ones
        self.weight = nn.Parameter(fill(width, dtype=params_dtype, device=device))
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        self.register_parameter("bias", None)

    def get_extra_state(self) -> Tensor:
        """Return the empty bytes."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        """Nothing."""

    def forward(self, inputs: Tensor) -> Tensor:
        """`[..., hidden]`."""
        return normalize(self.kind, inputs, self.weight, self.bias, self.eps, self.zero_centered_gamma)


class LayerNorm(RMSNorm):
    """With a mean taken off and a bias."""

    kind = "LayerNorm"

    def __init__(self, *args: Any, sequence_parallel: bool = False, **kwargs: Any):
        super().__init__(*args, sequence_parallel=sequence_parallel, **kwargs)
        self.bias = nn.Parameter(torch.zeros_like(self.weight))
        self.bias.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]


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
