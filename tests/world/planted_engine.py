# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The command with a fault in its vLLM engine: `python -m tests.world.planted_engine FAULT grpo --config ...`."""

import json
import sys
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

from torch import Tensor

from nemo_rl_moe.cli import main
from nemo_rl_moe.generation.vllm import actors
from nemo_rl_moe.generation.vllm.worker import VllmSettings, VllmWorker


class OtherRotation(VllmWorker):
    """An engine that takes a tenth of the model's base of rotary embeddings."""

    def __init__(self, settings: VllmSettings, *more: Any):
        config = json.loads(settings.model_files["config.json"])
        config["rope_parameters"]["rope_theta"] /= 10
        files = {**settings.model_files, "config.json": json.dumps(config).encode()}
        super().__init__(replace(settings, model_files=files), *more)


class OtherExperts(VllmWorker):
    """An engine whose routers name the next copy of the dense MLP, of two experts each, which computes the same."""

    def start(self) -> str | None:
        from nemo_rl_moe.generation.vllm import worker

        def turned(settings: object, name: str, tensor: Tensor) -> Tensor:
            return tensor.roll(2, 0) if name.endswith(".gate.weight") else tensor

        worker.as_loader_expects = turned
        return super().start()


class Stale(VllmWorker):
    """An engine that keeps the weights of its third transfer: behind the first come the check's, to others and back."""

    def start(self) -> str | None:
        from nemo_rl_moe.generation.vllm import worker

        kept: dict[str, Tensor] = {}
        num_received: Counter[str] = Counter()

        def stale(settings: object, name: str, tensor: Tensor) -> Tensor:
            num_received[name] += 1
            if num_received[name] == 3:
                kept[name] = tensor.clone()
            return kept.get(name, tensor)

        worker.as_loader_expects = stale
        return super().start()


FAULTS = {"other_rotation": OtherRotation, "other_experts": OtherExperts, "stale": Stale}

if __name__ == "__main__":
    with mock.patch.object(actors, "VllmWorker", FAULTS[sys.argv[1]]):
        sys.exit(main(sys.argv[2:]))
