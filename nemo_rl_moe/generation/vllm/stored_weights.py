# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights stored in a vLLM engine of one rank, by their Hugging Face names.

vLLM joins projections (`qkv_proj`, `gate_up_proj`, `w13_weight`) and, on CPUs, packs them into the layout of a kernel.
Here they are unpacked and split, so that the weights that the engine computes with are compared. Weights in an unknown
layout are skipped.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

PLAIN_BACKENDS = ("TRITON", "BATCHED_TRITON", "CPU")
"""Expert kernels that keep the order of the rows. Others swap, shuffle or interleave them."""
WIDEST_READ_OUT = 512
"""Maximum input width of a packed layer whose weights are read out: the cost grows with its square."""

_DELTA_NETS_INPUTS = "in_proj_qkvz"
"""Joined projection of a gated delta net. Files have it as one tensor, or as two: queries, keys and values, and the
output gates."""


def stored_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and values of each tensor whose layout is known, and of each expert separately."""
    joined: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    for path, module in model.named_modules():
        prefix = path.replace(".base_layer", "")  # of a layer with an adapter
        if hasattr(module, "w13_weight"):
            yield from _experts(prefix.removesuffix(".routed_experts"), module)
            continue
        for kind, parameter in module.named_parameters(recurse=False):
            values = _linear_weight(module) if kind == "weight" and not parameter.numel() else parameter.detach()
            if values is None:
                continue
            if (rows := getattr(module, "org_vocab_size", None)) is not None:
                values = values[:rows]  # vLLM pads the vocabulary
            if hasattr(module, "_cpu_unpacked_conv_weight"):
                values = _convolution(values)
            parent, _, own = prefix.rpartition(".")
            parts = joined.get(own, (own,))
            sizes = getattr(module, "output_sizes", None) or [len(values)]
            if own == _DELTA_NETS_INPUTS and len(parts) == 2 and len(sizes) == 4:
                sizes = [sum(sizes[:3]), sizes[3]]
            if len(parts) != len(sizes) or sum(sizes) != len(values):
                continue
            for part, of_part in zip(parts, values.split(list(sizes)), strict=True):
                yield ".".join(filter(None, (parent, part, kind))), of_part


def _linear_weight(module: Any) -> Tensor | None:
    """Return the weights of a linear layer that has packed them, by applying the layer to the identity matrix.

    Return None if the weights are not packed, or the layer is too wide for this.
    """
    # Exact: all products are with 0 and 1.
    kernel: Callable[[Tensor, None, None], Tensor] | None = getattr(module, "cpu_linear", None)
    widths = (getattr(module, name, None) for name in ("input_size_per_partition", "input_size", "embedding_dim"))
    width: int | None = next(filter(None, widths), None)
    if kernel is None or width is None or width > WIDEST_READ_OUT:
        return None
    return kernel(torch.eye(width, dtype=module.weight.dtype), None, None).t()


def _convolution(packed: Tensor) -> Tensor:
    """Return the packed weights of a gated delta net's convolution, `[channels, 1, taps]`."""
    # vLLM also keeps an unpacked copy, but computes with the packed one.
    from vllm._custom_ops import causal_conv1d_weight_pack

    unpack = unpacking(packed[None], "", pack=lambda values, isa: causal_conv1d_weight_pack(values[0]))
    return unpack(packed).unsqueeze(1)


def _experts(prefix: str, module: Any) -> Iterator[tuple[str, Tensor]]:
    method = module.quant_method
    backend = getattr(getattr(method, "unquantized_backend", None), "name", None)
    if backend not in PLAIN_BACKENDS or getattr(module, "is_fused_checkpoint_transposed", False):
        return
    gate_up, down = module.w13_weight.detach(), module.w2_weight.detach()
    unpack_gate_up, unpack_down = (lambda values: values), (lambda values: values)
    if backend == "CPU":
        kernel = getattr(method.moe_kernel, "fused_experts", None)
        if kernel is None or getattr(kernel, "_use_zentorch", False):
            return
        unpack_gate_up, unpack_down = (unpacking(gate_up, kernel.isa), unpacking(down, kernel.isa))
    width: int = module.moe_config.intermediate_size_per_partition
    names = module.ckpt_gate_proj_name, module.ckpt_up_proj_name, module.ckpt_down_proj_name
    for expert in range(len(gate_up)):
        gate, up = unpack_gate_up(gate_up[expert]).chunk(2)
        of_expert = gate[:width], up[:width], unpack_down(down[expert])[:, :width]
        for name, values in zip(names, of_expert, strict=True):
            yield f"{prefix}.{expert}.{name}.weight", values


def unpacking(
    packed: Tensor, isa: str, pack: Callable[[Tensor, str], Tensor] | None = None
) -> Callable[[Tensor], Tensor]:
    """Return a function that restores the row order of one expert's packed numbers.

    Packing only moves numbers. Packing a tensor that contains its own indices shows where each number goes.
    """
    if pack is None:
        from vllm._custom_ops import cpu_prepack_moe_weight

        pack = cpu_prepack_moe_weight
    shape = packed.shape[1:]
    places = torch.arange(shape.numel(), dtype=torch.int64)
    as_integers = torch.int32 if packed.dtype.itemsize == 4 else torch.int16
    found = torch.zeros_like(places)
    digit_bits = 15  # the capacity of a signed 16-bit integer
    for shift in range(0, max(1, int(places[-1]).bit_length()), digit_bits):
        digits = (places >> shift & (1 << digit_bits) - 1).to(as_integers)
        moved = pack(digits.view(packed.dtype).view(1, *shape).contiguous(), isa)
        found |= moved.contiguous().view(as_integers).flatten().long() << shift

    def unpack(values: Tensor) -> Tensor:
        flat = torch.empty(shape.numel(), dtype=values.dtype)
        flat[found] = values.flatten()
        return flat.view(shape)

    return unpack
