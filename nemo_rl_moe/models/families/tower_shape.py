# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Operations and activations of a vision tower and its projector by arithmetic, from their sizes."""

from collections.abc import Iterable
from dataclasses import dataclass

from nemo_rl_moe.config.schema_policy import FreezeConfig

_KEPT_BY_A_BLOCK = 8
"""Tensors of the hidden size that a block keeps for its backward pass; see `TowerShape.activations_at_least`."""


@dataclass(frozen=True)
class TowerShape:
    """Sizes of a vision tower and of the projector behind it.

    Attributes:
        num_blocks: Transformer blocks.
        hidden_size: Of a block.
        intermediate_size: Of a block's MLP.
        is_gated: The MLP has three matrices, of which one gates another; otherwise two.
        patch_dim: Numbers of a patch.
        merge_size: Rows, and columns, of patches that become one image token.
        projector_products: Multiplications of an image token in everything behind the blocks.
        window: Rows, and columns, of patches that see each other in a block with windows; None: no block has any.
        num_window_blocks: Blocks with windows; in the others all patches of a picture see each other.
        num_class_tokens: Places of a picture in the blocks beside its patches.
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
        """Operations of tower and of projector in a forward pass over one picture, counted as `models.flops` does.

        Args:
            rows: Of patches, a multiple of `merge_size`.
            columns: The same.
        """
        patches = rows * columns
        places, hidden = patches + self.num_class_tokens, self.hidden_size
        of_a_block = 4 * hidden**2 + (3 if self.is_gated else 2) * hidden * self.intermediate_size
        pairs = (self.num_blocks - self.num_window_blocks) * places**2
        if self.window is not None:
            pairs += self.num_window_blocks * _squares(rows, self.window) * _squares(columns, self.window)
        products = patches * self.patch_dim * hidden + places * self.num_blocks * of_a_block + 2 * hidden * pairs
        return 2 * products, 2 * patches // self.merge_size**2 * self.projector_products

    def training_flops(self, pictures: Iterable[tuple[int, int]], freeze: FreezeConfig) -> int:
        """Operations of a forward and a backward pass over pictures.

        A backward pass has one product of each for gradients of what is trained, and one for those of what comes before
        it and is trained. No gradient is made of pixels, whose one product counts nevertheless.

        Args:
            pictures: Rows and columns of patches of each that the tower runs.
            freeze: Parts that are not trained.
        """
        trains_tower, trains_projector = not freeze.vision_tower, not freeze.projector
        found = 0
        for rows, columns in pictures:
            tower, projector = self.forward_flops(rows, columns)
            found += tower * (3 if trains_tower else 1) + projector * (1 + trains_projector + trains_tower)
        return found

    def activations_at_least(self, patches: int, bytes_each: int) -> int:
        """Bytes that the blocks keep for the backward pass, a lower bound.

        Each block keeps, of each patch, the inputs of its two norms and of its first matrices (four of the hidden
        size), queries, keys and values (three), what attention gives to the output matrix (one), and of the MLP what
        its activation takes and what its last matrix takes; a gated one keeps both factors, too. With an intermediate
        size of four times the hidden one, two bytes a number and no gate that is 32 bytes times patches times hidden
        size: the 34 of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022),
        equation 1, without its dropout masks and, as attention is fused, without its matrices. Biased low: norms in
        float32, rotary embeddings and the projector are left out.

        Args:
            patches: Of a microbatch's distinct pictures.
            bytes_each: Bytes of a number.
        """
        of_the_mlp = (4 if self.is_gated else 2) * self.intermediate_size
        of_a_block = _KEPT_BY_A_BLOCK * self.hidden_size + of_the_mlp
        return patches * self.num_blocks * of_a_block * bytes_each


def _squares(length: int, window: int) -> int:
    """Pairs along one side of a picture that is cut into windows, the last of which may be narrower."""
    whole, rest = divmod(length, window)
    return whole * window**2 + rest**2
