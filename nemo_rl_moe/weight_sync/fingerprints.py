# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of weights: checksums of the trainer's tensors and of the tensors that an engine stores.

In 16 bits, rounding hides small faults in log-probabilities, but not in checksums. Both sides first round to a common
number format, so that a correct copy has the trainer's fingerprint in every format.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_moe.checksums import checksum_of

Fingerprints = Mapping[str, str]
"""Shape and checksum of each tensor, by its Hugging Face name."""
_MOST_NAMED = 4


def fingerprint(tensor: Tensor, number_format: str) -> str:
    dtype: torch.dtype = getattr(torch, number_format)
    values = (tensor.detach().to(dtype) + 0.0).cpu().contiguous()  # -0.0 becomes 0.0
    shape = "x".join(map(str, values.shape))
    return f"{shape} {checksum_of(values.flatten().view(torch.uint8).numpy())}"


def fingerprints_of(tensors: Iterable[tuple[str, Tensor]], number_format: str) -> dict[str, str]:
    return {name: fingerprint(tensor, number_format) for name, tensor in tensors}


def common_format(trainers: str, engines: str) -> str:
    """Return the format in which a correct copy equals the trainer's weights: the narrower of the two."""
    return trainers if engines == "float32" else engines


@dataclass(frozen=True)
class WeightComparison:
    different: Sequence[str]
    num_compared: int
    num_tensors: int

    @property
    def share_compared(self) -> float:
        return self.num_compared / self.num_tensors if self.num_tensors else 0.0

    def __str__(self) -> str:
        more = f" and {len(self.different) - _MOST_NAMED} more" if len(self.different) > _MOST_NAMED else ""
        return (
            f"{len(self.different)} of {self.num_compared} tensors differ:"
            f" {', '.join(self.different[:_MOST_NAMED])}{more}"
        )


def compare_fingerprints(found: Fingerprints, expected: Fingerprints) -> WeightComparison:
    """Return the comparison of an engine's stored tensors with the trainer's.

    Names that one side lacks are skipped. Tensors of different shapes are skipped, too: an engine cannot load weights
    of a wrong shape, so it stores them in another layout.
    """
    shared = [name for name in expected if name in found and _shape(found[name]) == _shape(expected[name])]
    different = [name for name in shared if found[name] != expected[name]]
    return WeightComparison(different, len(shared), len(expected))


def _shape(of: str) -> str:
    return of.partition(" ")[0]
