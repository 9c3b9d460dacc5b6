# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Share of checksums in saving and loading a model: with and without them, in turns. Prints one JSON line.

A small Qwen3-MoE is read and written by `nemo-rl-moe convert` in this process: from Hugging Face's format into
Megatron-Core's and back, all files flushed to the disk, and read from it, not from memory. Every other time the hash
functions do nothing and nothing is compared before it is read.
"""

import argparse
import contextlib
import io
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from small_model import positive, write_model
from transformers import AutoConfig, AutoModelForCausalLM

from nemo_rl_moe import checksums
from nemo_rl_moe.launch.convert import Conversion, convert
from nemo_rl_moe.models.megatron.model import agreement
from nemo_rl_moe.models.model_files import WeightsFormat

EXAMPLES = """\
examples:
  python benchmarks/checksums.py                      0.2 gigabytes
  python benchmarks/checksums.py --hidden-size 1024   0.8 gigabytes

ratio is the median, over rounds, of the seconds with checksums divided by those without; low and high are its
quartiles. cpu_ratio is the same of the processor's time. Files go to the folder for temporary files: set TMPDIR to
measure another disk."""


class NoHash:
    """A hash function that takes no time."""

    def update(self, data: object) -> None:
        """Takes bytes."""

    def hexdigest(self) -> str:
        """Digits that are always the same."""
        return "0" * 32


@contextlib.contextmanager
def without_checksums() -> Iterator[None]:
    """Nothing is hashed, and nothing compared."""
    with (
        mock.patch.object(checksums, "xxh3_128", NoHash),
        mock.patch.object(checksums, "_compared", return_value=None),
        mock.patch.object(agreement, "find_damage", return_value=[]),
    ):
        yield


def seconds(source: Path, target: Path, formats: tuple[WeightsFormat, WeightsFormat]) -> tuple[float, float]:
    """Seconds on the clock, and of the processor, of one conversion whose input is on the disk alone."""
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    for path in source.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    began, cpu_began = time.perf_counter(), time.process_time()
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        convert(Conversion(*formats, source, target, None))
    return time.perf_counter() - began, time.process_time() - cpu_began


def measure(folder: Path, num_rounds: int) -> dict[str, Any]:
    """Ratios of both directions."""
    model, megatron = folder / "model", folder / "megatron"
    # The first conversions write what the others read: with its checksums.
    seconds(model, megatron, ("hf", "megatron"))
    shutil.rmtree(model)
    seconds(megatron, model, ("megatron", "hf"))
    ways: dict[str, tuple[Path, tuple[WeightsFormat, WeightsFormat]]] = {
        "hf_to_megatron": (model, ("hf", "megatron")),
        "megatron_to_hf": (megatron, ("megatron", "hf")),
    }
    result: dict[str, Any] = {
        "megabytes": round(sum(path.stat().st_size for path in model.iterdir()) / 1e6, 1),
    }
    for name, (source, formats) in ways.items():
        rounds = []
        for number in range(num_rounds):
            found = {}
            for is_on in (True, False) if number % 2 else (False, True):
                with contextlib.nullcontext() if is_on else without_checksums():
                    found[is_on] = seconds(source, folder / "out", formats)
            rounds.append([on / off for on, off in zip(found[True], found[False], strict=True)])
        wall, cpu = zip(*rounds, strict=True)
        low, middle, high = statistics.quantiles(wall, n=4)
        result[name] = {
            "ratio": round(middle, 3),
            "low": round(low, 3),
            "high": round(high, 3),
            "cpu_ratio": round(statistics.median(cpu), 3),
            "seconds": round(found[True][0], 2),
        }
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line, runs, and prints the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=positive, default=8, help="conversions of each kind (default: 8)")
    parser.add_argument("--hidden-size", type=positive, default=512, help="the model's width (default: 512)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder, width = Path(name, "model"), options.hidden_size
        num_parameters = write_model(folder, hidden_size=width, moe_intermediate_size=2 * width)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
        result = measure(Path(name), options.rounds)
    print(json.dumps({"benchmark": "checksums", "parameters": num_parameters, "rounds": options.rounds} | result))


if __name__ == "__main__":
    main()
