# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Accelerators with their memory and speed, and the machines that a run is planned for."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from nemo_rl_moe.config.suggestions import did_you_mean, nearest, shortened
from nemo_rl_moe.errors import ConfigurationError


@dataclass(frozen=True)
class Accelerator:
    """An accelerator, by its data sheet.

    Attributes:
        memory_gb: Memory in GB of 10^9 bytes.
        bfloat16_tflops: Peak TFLOP/s of dense matrix products.
        device_names: CUDA's names of the device.
    """

    name: str
    memory_gb: int
    bfloat16_tflops: float
    device_names: tuple[str, ...]


# From NVIDIA's data sheets, halved if they only give speeds with sparsity.
ACCELERATORS: dict[str, Accelerator] = {
    card.name: card
    for card in (
        Accelerator("A100-40GB", 40, 312, ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB")),
        Accelerator("A100-80GB", 80, 312, ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe")),
        Accelerator("H100", 80, 989, ("NVIDIA H100 80GB HBM3",)),
        Accelerator("H100-PCIe", 80, 756, ("NVIDIA H100 PCIe",)),
        Accelerator("H100-NVL", 94, 835, ("NVIDIA H100 NVL",)),
        Accelerator("H200", 141, 989, ("NVIDIA H200",)),
        Accelerator("H20", 96, 148, ("NVIDIA H20",)),
        Accelerator("B200", 180, 2250, ("NVIDIA B200",)),
        Accelerator("L40S", 48, 362, ("NVIDIA L40S",)),
    )
}


def peak_flops_per_second(device_names: Iterable[str]) -> float | None:
    """Return the peak FLOP/s of dense bfloat16 matrix products of several devices. None if one is unknown.

    Names are compared in full, as an H200 NVL or a MIG slice of an H200 is not an H200.
    """
    by_name = {name: card.bfloat16_tflops for card in ACCELERATORS.values() for name in card.device_names}
    tflops = [by_name.get(name) for name in device_names]
    return None if None in tflops else 1e12 * sum(filter(None, tflops))


@dataclass(frozen=True)
class Target:
    """Machines that a run is planned for."""

    num_nodes: int
    gpus_per_node: int
    card: Accelerator

    @property
    def overrides(self) -> list[str]:
        """Configuration overrides (`key=value`) that set these numbers of nodes and GPUs."""
        return [f"cluster.num_nodes={self.num_nodes}", f"cluster.gpus_per_node={self.gpus_per_node}"]

    def __str__(self) -> str:
        nodes = "" if self.num_nodes == 1 else f"{self.num_nodes}x"
        return f"{nodes}{self.gpus_per_node}x{self.card.name}"


def parse_target(text: str) -> Target:
    """Return the machines in `GPUSxCARD` or `NODESxGPUSxCARD`, such as `8xH100` or `4x8xA100-80GB`."""
    form = re.fullmatch(r"(?:(\d{1,6})x)?(\d{1,3})x([\w-]+)", text, flags=re.ASCII)
    if form is None or 0 in (int(form[1] or 1), int(form[2])):
        raise ConfigurationError(
            f"--target: got {shortened(text)!r}, expected GPUSxCARD or NODESxGPUSxCARD, such as 8xH100 or 4x8xA100-80GB"
        )
    by_name = {name.lower(): card for name, card in ACCELERATORS.items()}
    card = by_name.get(form[3].lower())
    if card is None:
        close = nearest(form[3].lower(), by_name)
        raise ConfigurationError(
            f"--target: got the card {shortened(form[3])}, expected one of {', '.join(ACCELERATORS)}"
            f"{did_you_mean(by_name[close].name if close else None)}"
        )
    return Target(int(form[1] or 1), int(form[2]), card)
