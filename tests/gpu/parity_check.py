# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The losses of a GPU in bfloat16 against those of CPUs in float32, from the same weights and tokens."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from tests.gpu.models import Failed, Numbers, packed_shard, run_config, small_config
from tests.gpu.process import job_of_one

NUM_STEPS = 3
LOSS_TOLERANCE = 1e-2
"""Relative; half a unit in the last place of bfloat16 is 2e-3, and errors of layers add up."""
_KEYS: dict[str, Any] = {"tokens": 64, "megatron_cfg__optimizer__lr": 1e-3}


def parity_with_cpu(*, rehearse: bool) -> Iterator[Numbers]:
    """Three steps on the GPU from the weights that a process on CPUs began with."""
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as scratch:
        size = "tiny" if rehearse else "small"
        command = [sys.executable, "-m", "tests.gpu.parity_check", scratch, size]
        # A process of its own: whether there is a GPU is found out once, when Megatron-Core is imported.
        subprocess.run(command, check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
        expected = json.loads((Path(scratch) / "losses.json").read_text(encoding="utf-8"))
        config = run_config(rehearse=rehearse, **_KEYS, precision="bfloat16")
        found = _losses(config, small_config(rehearse=rehearse), Path(scratch) / "weights", None)
    gaps = [abs(ours - theirs) / theirs for ours, theirs in zip(found, expected, strict=True)]
    numbers = {"losses": found, "losses_on_cpu": expected, "largest_gap": max(gaps), "tolerance": LOSS_TOLERANCE}
    if max(gaps) > LOSS_TOLERANCE:
        raise Failed(f"a loss is off by {max(gaps):.2%}, more than {LOSS_TOLERANCE:.0%}", numbers)
    if not found[-1] < found[0]:
        raise Failed("the loss of one batch does not fall", numbers)
    yield numbers


def _losses(config: Any, hf_config: Any, weights: Path | None, save_to: Path | None) -> list[float]:
    """Losses of steps on one batch, from weights of a folder or random ones, which are kept in another."""
    shard = packed_shard(config, hf_config.vocab_size, seed=0)
    with job_of_one(config.policy):
        from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer

        trainer = MegatronTrainer(config.policy, hf_config, weights, num_steps=10)
        if save_to is not None:
            trainer.save_weights(save_to, {})
        return [trainer.train([shard], sft_loss).global_loss for _ in range(NUM_STEPS)]


def main(scratch: Path, *, tiny: bool) -> None:
    """Run what the process on CPUs does."""
    config = run_config(rehearse=True, **_KEYS)
    losses = _losses(config, small_config(rehearse=tiny), None, scratch / "weights")
    (scratch / "losses.json").write_text(json.dumps(losses), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), tiny=sys.argv[2] == "tiny")
