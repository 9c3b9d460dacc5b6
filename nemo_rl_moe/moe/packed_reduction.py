# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Many tensors, one collective, one copy to the host."""

import torch
import torch.distributed as dist
from torch import Tensor


def sum_over_ranks(parts: list[Tensor], device: torch.device) -> list[Tensor]:
    """Sums every tensor over all ranks of the job.

    All axes of the layout (data, tensor, expert, pipeline) are covered by the one collective: a rank that holds nothing
    of some part gives zeros of the same shape. Numbers travel as float64, in which counts below 2^53 are exact.

    Args:
        parts: Tensors of the same shapes and in the same order on every rank.
        device: Where the collective runs.

    Returns:
        The sums as float64 tensors on the host, in the shapes of the parts; the same on every rank.
    """
    packed = torch.cat([part.to(device=device, dtype=torch.float64).reshape(-1) for part in parts])
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(packed)
    on_host = packed.cpu()
    sizes = [part.numel() for part in parts]
    return [piece.view(part.shape) for piece, part in zip(on_host.split(sizes), parts, strict=True)]
