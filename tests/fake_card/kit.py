# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs a check of `tests.gpu` as on a GPU, at sizes that a host computes: python -m tests.fake_card.kit NAME RESULTS.

A rehearsal of the checks takes other settings than a GPU: float32, an optimizer without Transformer Engine, and memory
of the host in place of CUDA's handles. Here only sizes are others.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nemo_rl_moe.weight_sync.transport_backends import make_backend
from tests.gpu import checks, decode, models, parity_check, refit, run
from tests.support import pretended_gpu

SIZES: Mapping[str, int] = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "intermediate_size": 1024,
    "vocab_size": 16384,
}
"""In place of those of Qwen3-30B-A3B. Tensors have megabytes, as the allocator's segments would be seen otherwise."""
_LAYERS = 2
FEWER_TOKENS, FEWEST = 12, 64
"""What tokens of a row are divided by, and how many are left at least."""
_KERNELS = str(Path(__file__).resolve().with_name("host_kernels.py"))


def _make_small() -> None:
    """Replaces the sizes of the slice of Qwen3-30B-A3B, and of rows."""
    assert isinstance(models.QWEN3_30B_A3B, dict)
    models.QWEN3_30B_A3B.update(SIZES)
    models._SLICE_LAYERS = _LAYERS
    checks._LARGER.clear()
    overrides = models._overrides

    def with_fewer_tokens(values: Mapping[str, Any]) -> list[str]:
        tokens = max(FEWEST, values["policy.max_total_sequence_length"] // FEWER_TOKENS)
        changes = dict.fromkeys(("policy.max_total_sequence_length", "policy.sequence_packing.train_mb_tokens"), tokens)
        if "policy.generation.max_new_tokens" in values:
            changes["policy.generation.max_new_tokens"] = tokens // 2
        return overrides({**values, **changes})

    models._overrides = with_fewer_tokens
    # The stand-in's optimizer makes no float32 copies of moments, so that `plan`'s peak is not reached.
    memory_problem = checks.memory_problem
    checks.memory_problem = lambda numbers: memory_problem(
        {**numbers, "peak_bytes": numbers["planned_peak_bytes_at_least"]}
    )
    # Two processes on one card, as engines on GPUs of their own would receive.
    refit._backends = lambda *, rehearse: {
        way: lambda count, group, way=way: make_backend(way, group, count, "127.0.0.1")
        for way in ("files", "cuda_ipc", "nccl")
    }
    decode.NUM_TOKENS, decode.PROMPT_TOKENS, decode.ROWS = 24, 16, 8
    # A wait is for who has called a kernel.
    pretended_gpu._SKIPPED = (*pretended_gpu._SKIPPED, _KERNELS)


def _make_parity_tiny() -> None:
    """Gives both processes of the check the sizes of a rehearsal; precision and modules stay those of a GPU."""
    start = parity_check.subprocess.run

    def run_with_tiny_model(command: list[str], **options: Any) -> Any:
        return start([*command[:-1], "tiny"], **options)

    parity_check.subprocess = SimpleNamespace(run=run_with_tiny_model)
    parity_check.small_config = lambda *, rehearse: models.small_config(rehearse=True)


_make_small()  # in the processes that a check spawns too, which import this module


def main() -> None:
    """Run one check; its lines go into a file."""
    name, results = sys.argv[1:]
    if name == "save_and_resume":  # experts are computed one by one; a check that starts a process keeps its own sizes
        assert isinstance(models._SMALL, dict)
        models._SMALL.update(num_experts=16, num_experts_per_tok=4)
    if name == "parity_with_cpu":
        _make_parity_tiny()
    (function,) = (check.function for check in run.CHECKS if check.name == name)
    run._inside(function, Path(results), rehearse=False)


if __name__ == "__main__":
    main()
