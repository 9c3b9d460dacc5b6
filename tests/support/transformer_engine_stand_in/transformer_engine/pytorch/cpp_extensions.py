# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A product whose result has a number format of its own, as routers have it."""

from typing import Any

import torch
from torch import Tensor


def general_gemm(
    A: Tensor,
    B: Tensor,
    workspace: Any = None,
    out_dtype: torch.dtype | None = None,
    layout: str = "TN",
    bias: Tensor | None = None,
    grad: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None, None, None]:
    """Return the product of two matrices as a column-major library sees them: `TN` is `B A^T`, `NN` is `B A`, `NT` is
    `B^T A`.

    The two may differ in their number formats only outside of a backward pass, where cuBLAS wants them equal.
    """
    if grad and A.dtype != B.dtype:
        raise RuntimeError(f"no kernel for {A.dtype} with {B.dtype}")
    for name in ("gelu", "gelu_in", "accumulate", "out", "quantization_params", "ub", "extra_output", "bulk_overlap"):
        if kwargs.get(name):
            raise NotImplementedError(name)
    wanted = out_dtype or A.dtype
    left, right = B.to(wanted), A.to(wanted)
    found = {"TN": lambda: left @ right.t(), "NN": lambda: left @ right, "NT": lambda: left.t() @ right}[layout]()
    return (found if bias is None else found + bias.to(wanted)), None, None, None
