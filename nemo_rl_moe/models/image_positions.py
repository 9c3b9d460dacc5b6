# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Positions in time, height and width (multimodal rotary embedding, Qwen2-VL: Wang et al. 2024, 2.1).

In text, all three positions count up together. All tokens of an image have the time of its first token, and count rows
and columns from this position. The text after an image continues after the larger of the image's height and width.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def image_positions(
    is_image: Bool[Tensor, "rows columns"], grids: Sequence[tuple[int, int]]
) -> Int[Tensor, "3 rows columns"]:
    """Return the positions of sequences, one per row. Responses and padding have consecutive positions, as text has.

    Args:
        is_image: True for image tokens.
        grids: Number of rows and columns of tokens of each image, in the order of the images' tokens over all
            sequences.
    """
    rows, columns = is_image.shape
    positions = torch.arange(columns).expand(3, rows, columns).clone()
    remaining = iter(grids)
    for row in is_image.any(1).nonzero()[:, 0].tolist():
        at, (marked,) = 0, is_image[row].numpy().nonzero()
        first_of_image = 0
        while first_of_image < len(marked):
            start = int(marked[first_of_image])
            height, width = next(remaining, (0, 0))
            last = first_of_image + height * width - 1
            if height * width == 0 or last >= len(marked) or marked[last] != start + height * width - 1:
                raise ValueError(
                    f"row {row}: the image tokens from position {start} on do not match the next image's size in grids"
                )
            here = int(positions[0, row, start])
            down, right = torch.arange(height)[:, None], torch.arange(width)[None]
            block = torch.stack([torch.zeros(height, width, dtype=torch.long), *torch.broadcast_tensors(down, right)])
            at = start + height * width
            positions[:, row, start:at] = here + block.reshape(3, -1)
            positions[:, row, at:] = here + max(height, width) + torch.arange(columns - at)
            first_of_image = last + 1
    if next(remaining, None) is not None:
        raise ValueError("there are more images than image tokens")
    return positions
