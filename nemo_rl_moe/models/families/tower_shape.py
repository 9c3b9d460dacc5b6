# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations and activations of a vision tower and its projector, by arithmetic."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_rl_moe.config.schema_policy import FreezeConfig

_KEPT_BY_A_BLOCK = 8
"""Number of tensors of the hidden size that a block keeps for its backward pass. They are listed in
`TowerShape.activations_at_least`."""


@dataclass(frozen=True)
class TowerShape:
    """Sizes of a vision tower and its projector.

    Attributes:
        is_gated: Whether the MLP has a gate, which is a third matrix.
        patch_dim: Number of input values of a patch.
        merge_size: Side, in patches, of the square that becomes one image token.
        projector_products: Number of multiplications per image token in the projector.
        window: Side, in patches, of attention windows, or None.
        num_window_blocks: Number of blocks with windows. In the other blocks all patches of an image attend to each
            other.
        num_class_tokens: Number of additional tokens of an image in the blocks.
    """

    num_blocks: int
    hidden_size: int
    intermediate_size: int
    is_gated: bool
    patch_dim: int
    merge_size: int
    projector_products: int
    window: int | None = None
    num_window_blocks: int = 0
    num_class_tokens: int = 0

    def forward_flops(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the operations of tower and of projector in a forward pass over `rows` x `columns` patches."""
        patches = rows * columns
        positions, hidden = patches + self.num_class_tokens, self.hidden_size
        of_a_block = 4 * hidden**2 + (3 if self.is_gated else 2) * hidden * self.intermediate_size
        pairs = (self.num_blocks - self.num_window_blocks) * positions**2
        if self.window is not None:
            pairs += self.num_window_blocks * _squares(rows, self.window) * _squares(columns, self.window)
        products = patches * self.patch_dim * hidden + positions * self.num_blocks * of_a_block + 2 * hidden * pairs
        return 2 * products, 2 * patches // self.merge_size**2 * self.projector_products

    def training_flops(self, images: Iterable[tuple[int, int]], freeze: "FreezeConfig") -> int:
        """Return the operations of a forward and a backward pass over images, given by rows and columns of patches.

        A backward pass has one product for each gradient of a trained weight, and one for the gradient of each input
        that depends on a trained weight. Pixels get no gradient, but the product for their gradient is counted.
        """
        trains_tower, trains_projector = not freeze.vision_tower, not freeze.projector
        found = 0
        for rows, columns in images:
            tower, projector = self.forward_flops(rows, columns)
            found += tower * (3 if trains_tower else 1) + projector * (1 + trains_projector + trains_tower)
        return found

    def activations_at_least(self, patches: int, bytes_each: int) -> int:
        """Return a lower bound, in bytes, of the activations that the blocks keep for the backward pass.

        For each patch, a block keeps the inputs of its two norms and first matrices (four of the hidden size), queries,
        keys and values (three), the input of the output matrix (one), and the inputs of the MLP's activation and of its
        last matrix. A gated MLP keeps both factors. With an intermediate size of four times the hidden size, two bytes
        per number and no gate, this is 32 bytes x patches x hidden size. Equation 1 of Korthikanti et al., "Reducing
        Activation Recomputation in Large Transformer Models" (2022), has 34 in place of 32, because it includes dropout
        masks, and a further term for attention matrices. Float32 norms, rotary embeddings and the projector are omitted
        here.
        """
        of_the_mlp = (4 if self.is_gated else 2) * self.intermediate_size
        of_a_block = _KEPT_BY_A_BLOCK * self.hidden_size + of_the_mlp
        return patches * self.num_blocks * of_a_block * bytes_each


def _squares(length: int, window: int) -> int:
    """Return the sum of squared window widths along one side of an image. The last window may be narrower."""
    whole, rest = divmod(length, window)
    return whole * window**2 + rest**2
