# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Sizes of layers with a recurrent state, on one tensor-parallel rank: gated delta nets and Mamba-2."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_rl_moe.models.layer_kinds import Mixer, recurrent_mixer


class RecurrentSizes(ABC):
    """Sizes that all layers with a recurrent state have.

    Attributes:
        taps: Number of tokens that the convolution sees, including the current token.
    """

    taps: int

    @property
    @abstractmethod
    def heads(self) -> int:
        """Number of heads, each with a state and a decay."""

    @property
    @abstractmethod
    def convolved(self) -> tuple[int, ...]:
        """Numbers of channels of each section of the convolution."""

    @property
    @abstractmethod
    def values(self) -> int:
        """Number of outputs of all heads."""

    @property
    @abstractmethod
    def projected(self) -> tuple[int, ...]:
        """Numbers of rows of each section of the input projection."""

    @property
    @abstractmethod
    def of_state(self) -> int:
        """Number of entries of the heads' state of one sequence."""

    @property
    @abstractmethod
    def vectors(self) -> int:
        """Number of weights besides the projections and the convolution's matrix."""

    def parameters(self, hidden_size: int) -> int:
        """Return the number of weights of a layer, without the norm of its hidden states."""
        return hidden_size * (sum(self.projected) + self.values) + sum(self.convolved) * self.taps + self.vectors

    def state_bytes(self, itemsize: int) -> int:
        """Return the bytes of a layer's state for one sequence: float32 matrices and the convolution's last inputs."""
        return self.of_state * torch.float32.itemsize + sum(self.convolved) * (self.taps - 1) * itemsize


@dataclass(frozen=True)
class DeltaNetSizes(RecurrentSizes):
    """Sizes of a model's gated delta nets on each tensor-parallel rank.

    Attributes:
        key_heads: Number of heads of queries and keys. `value_heads / key_heads` value heads share each of them.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @classmethod
    def of(cls, config: TransformerConfig, tensor: int) -> "DeltaNetSizes":
        """Return the sizes on each of `tensor` ranks."""
        return cls(
            config.linear_num_key_heads // tensor,
            config.linear_num_value_heads // tensor,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
            config.linear_conv_kernel_dim,
        )

    @property
    def heads(self) -> int:
        return self.value_heads

    @property
    def convolved(self) -> tuple[int, int, int]:
        """Numbers of channels of queries, keys and values."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.values

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def projected(self) -> tuple[int, int, int, int, int, int]:
        """Numbers of rows of the input projection: queries, keys, values, output gates, rates and decays."""
        return *self.convolved, self.values, self.value_heads, self.value_heads

    @property
    def of_state(self) -> int:
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def vectors(self) -> int:
        """Number of decays, their biases, and weights of the output norm, which every rank holds in full."""
        return 2 * self.value_heads + self.value_dim


@dataclass(frozen=True)
class MambaSizes(RecurrentSizes):
    """Sizes of a model's Mamba-2 layers on each tensor-parallel rank.

    Attributes:
        groups: Number of groups of heads. The heads of a group share the projections into and out of the state.
        state_dim: Number of entries of the state for each channel of a head.
    """

    num_heads: int
    head_dim: int
    groups: int
    state_dim: int
    taps: int

    @classmethod
    def of(cls, config: TransformerConfig, tensor: int) -> "MambaSizes":
        """Return the sizes on each of `tensor` ranks."""
        return cls(
            config.mamba_num_heads // tensor,
            config.mamba_head_dim,
            config.mamba_num_groups // tensor,
            config.mamba_state_dim,
            config.linear_conv_kernel_dim,
        )

    @property
    def heads(self) -> int:
        return self.num_heads

    @property
    def convolved(self) -> tuple[int, int, int]:
        """Numbers of channels of heads, and of the projections into the state and out of it."""
        of_groups = self.groups * self.state_dim
        return self.values, of_groups, of_groups

    @property
    def values(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def projected(self) -> tuple[int, int, int, int, int]:
        """Numbers of rows of the input projection: output gates, the convolution's channels, and time steps."""
        return self.values, *self.convolved, self.num_heads

    @property
    def of_state(self) -> int:
        return self.values * self.state_dim

    @property
    def vectors(self) -> int:
        """Number of decays, biases of time steps, skips, biases of the convolution, and weights of the norm."""
        return 3 * self.num_heads + sum(self.convolved) + self.values


def recurrent_sizes(config: TransformerConfig, tensor: int | None = None) -> RecurrentSizes:
    """Return the sizes of a model's recurrent layers on each of `tensor` ranks, by default as the model is split."""
    tensor = config.tensor_model_parallel_size if tensor is None else tensor
    mixer = recurrent_mixer(config)
    assert mixer is not None  # the caller has found such a layer
    return (MambaSizes if mixer is Mixer.MAMBA else DeltaNetSizes).of(config, tensor)
