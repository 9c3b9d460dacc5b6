# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Linear layers without tensor parallelism: Megatron-Core's parameters, torch's product.

Megatron's own autograd function prepares for communication and fused gradient accumulation even where there is none.
"""

import torch.nn.functional as F
from torch import Tensor

from nemo_rl_moe.models.megatron import cpu_backend  # noqa: F401  (before megatron.core)

# isort: split
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear


class PlainColumnLinear(ColumnParallelLinear):
    """`ColumnParallelLinear` for a tensor-parallel group of one rank."""

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Multiplies `[..., input_size]` by the weight; there is nothing to gather.

        Returns:
            The product `[..., output_size]`, and the bias where the caller adds it.
        """
        chosen = self.weight if weight is None else weight
        if self.skip_bias_add:
            return F.linear(input_, chosen), self.bias
        return F.linear(input_, chosen, self.bias), None


class PlainRowLinear(RowParallelLinear):
    """`RowParallelLinear` for a tensor-parallel group of one rank."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Multiplies `[..., input_size]` by the weight; there is nothing to reduce.

        Returns:
            The product `[..., output_size]`, and the bias where the caller adds it.
        """
        if self.skip_bias_add:
            return F.linear(input_, self.weight), self.bias
        return F.linear(input_, self.weight, self.bias), None
