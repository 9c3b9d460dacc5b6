# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Seconds and memory of `nemo-rl-moe audit` on a large capture folder, on one core. Prints one JSON line.

The capture has every column: routes of rollout and training with differing rows, log-probabilities of engine, trainer
and replay, margins, advantages. Making it is not timed.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from small_model import make_parser, positive

from nemo_rl_moe.runs.folder.capture_folder import CaptureFolderWriter
from nemo_rl_moe.runs.folder.captured_sequences import CaptureDescription, CapturedSequence

EXAMPLES = """\
examples:
  python benchmarks/audit_scale.py                        a million tokens, 48 layers, 8 of 128 experts
  python benchmarks/audit_scale.py --tokens 100000"""
LENGTH, SEQUENCES_A_STEP, DIFFERING = 1000, 64, 0.02


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    with tempfile.TemporaryDirectory(prefix="audit_scale_") as name:
        capture = Path(name) / "capture"
        num_tokens = make_capture(capture, options)
        size = sum(path.stat().st_size for path in capture.iterdir())
        started = time.perf_counter()
        audit = [
            sys.executable,
            "-m",
            "nemo_rl_moe.cli",
            "audit",
            str(capture),
            "--json",
            str(Path(name) / "audit.json"),
        ]
        with _one_core():
            done = subprocess.run(audit, capture_output=True, text=True, check=False)
        seconds, used = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        (run,) = json.loads((Path(name) / "audit.json").read_text())
        assert sum(step["num_tokens"] for step in run["steps"]) == num_tokens
    result = {
        "tokens": num_tokens,
        "layers": options.layers,
        "experts": options.experts,
        "topk": options.topk,
        "steps": len(run["steps"]),
        "captured_bytes": size,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
        "peak_bytes": used.ru_maxrss * 1024,
    }
    print(json.dumps(result))
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, EXAMPLES)
    parser.add_argument("--tokens", type=positive, default=1_000_000, help="approximate number (default: 1000000)")
    parser.add_argument("--layers", type=positive, default=48, help="MoE layers (default: 48)")
    parser.add_argument("--experts", type=positive, default=128, help="of a layer, a power of 2 (default: 128)")
    parser.add_argument("--topk", type=positive, default=8, help="experts of a token (default: 8)")
    return parser.parse_args(arguments)


def make_capture(folder: Path, options: argparse.Namespace) -> int:
    """Write steps with 64 sequences of 1,000 tokens, and return the number of tokens."""
    generator = np.random.default_rng(0)
    writer = CaptureFolderWriter(
        folder, CaptureDescription(tuple(range(options.layers)), options.experts, options.topk)
    )
    left = max(options.tokens // LENGTH, 1)
    num_tokens, step = left * LENGTH, 0
    while left:
        step += 1
        sequences = [_sequence(f"s{number}", generator, options) for number in range(min(left, SEQUENCES_A_STEP))]
        writer.write(step, sequences)
        left -= len(sequences)
    return num_tokens


def _sequence(name: str, generator: np.random.Generator, options: argparse.Namespace) -> CapturedSequence:
    shape = (LENGTH, options.layers)
    live = _experts(generator, shape, options)
    rollout = live.copy()
    differs = generator.random(shape) < DIFFERING
    rollout[differs] = _experts(generator, (int(differs.sum()),), options)
    logprobs = -generator.random(LENGTH, dtype=np.float32)
    columns = {
        "token_ids": generator.integers(0, 100_000, LENGTH, dtype=np.int32),
        "loss_mask": np.arange(LENGTH) > LENGTH // 10,
        "rollout_experts": rollout[:-1],
        "training_experts": live,
        "rollout_logprobs": logprobs,
        "replayed_logprobs": logprobs + generator.normal(0, 1e-3, LENGTH).astype(np.float32),
        "training_logprobs": logprobs + generator.normal(0, 1e-2, LENGTH).astype(np.float32),
        "weight_versions": np.ones(LENGTH, dtype=np.int32),
        "advantages": np.full(LENGTH, generator.normal(), dtype=np.float32),
        "margins": generator.random(shape, dtype=np.float32),
    }
    return CapturedSequence(name, LENGTH, columns, reward=float(generator.random()))


def _experts(generator: np.random.Generator, shape: tuple[int, ...], options: argparse.Namespace) -> np.ndarray:
    """Return different experts in each row: odd steps from a random first one, modulo a power of 2."""
    first = generator.integers(0, options.experts, (*shape, 1), dtype=np.int16)
    stride = generator.integers(0, options.experts // 2, (*shape, 1), dtype=np.int16) * 2 + 1
    return (first + stride * np.arange(options.topk, dtype=np.int16)) % options.experts


@contextmanager
def _one_core() -> Iterator[None]:
    """Give new processes one core, independent of their number of threads."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


if __name__ == "__main__":
    sys.exit(main())
