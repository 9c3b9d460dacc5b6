# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Cost of checksums in saving, loading and the start of a run, with and without them in turns. Prints one JSON line.

A small Qwen3-MoE and its optimizer, on one rank in this process, are saved and loaded like in a run: as a training
checkpoint in Megatron-Core's format (model, optimizer, schedule, random states), and as an exported model in Hugging
Face's format. Saved files are flushed to the disk. They are loaded from the disk (`load_cold`), like at the start of a
job, and from the page cache (`load_warm`). Every other time, the hash functions do nothing, and nothing is compared.
"""

import contextlib
import ctypes
import json
import math
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from small_model import REPOSITORY, confine, make_parser, not_negative, one_rank, positive, write_model

from nemo_rl_moe import checksums
from nemo_rl_moe.atomic_writes import put_in_place
from nemo_rl_moe.checked_reading import PartsRead
from nemo_rl_moe.config.loading import load_config
from nemo_rl_moe.models.hf_files import load_hf_config
from nemo_rl_moe.models.megatron.model import agreement
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from nemo_rl_moe.models.megatron.weights.hf_import import load_weights

EXAMPLES = """\
examples:
  python benchmarks/checksums.py                      a model of 0.2 gigabytes, a checkpoint of 0.6
  python benchmarks/checksums.py --hidden-size 1024   four times as large
  python benchmarks/checksums.py --cores 2            comparison in two threads
  python benchmarks/checksums.py --starts 3           besides, runs from the exported model, up to their first step

cached is the largest share of the files' pages that the system held in memory before a measurement (mincore): 0 where
all came from the disk, 1 where nothing did. seconds are the median of those with checksums, added_seconds of what they
add. ratio is the median, over rounds, of the seconds with checksums divided by those without, each pair one after the
other; low and high bound the median with 95% confidence. cpu_ratio, cpu_low and cpu_high are the same of the
processor's time. share is what the comparison adds to a start, from the command to the metrics of the first step. Files
go to the folder for temporary files: set TMPDIR to measure another disk."""


class NoHash:
    """A hash function that takes no time."""

    def update(self, data: object) -> None:
        """Take bytes."""

    def hexdigest(self) -> str:
        """Return constant digits."""
        return "0" * 32


@contextlib.contextmanager
def without_checksums() -> Iterator[None]:
    """Disable hashing and comparison."""
    with (
        mock.patch.object(checksums, "xxh3_128", NoHash),
        mock.patch.object(agreement, "find_damage", return_value=[]),
        mock.patch.object(PartsRead, "of_folder", return_value=None),
    ):
        yield


@contextlib.contextmanager
def trainer_of(model: Path) -> Iterator[MegatronTrainer]:
    """Make the model with its optimizer, on the only rank of a job."""
    overrides = [
        f"policy.model_name={model}",
        "cluster.cpu_workers_per_node=1",
        "policy.train_global_batch_size=1",
        "policy.train_micro_batch_size=1",
    ]
    policy = load_config("sft_tiny_moe.yaml", overrides, check_paths=False).policy
    with one_rank(policy):
        yield MegatronTrainer(policy, load_hf_config(str(model)), None, num_steps=1000)


class SavedForms:
    """Both formats of a saved trainer, in a folder."""

    def __init__(self, trainer: MegatronTrainer, folder: Path):
        self._trainer = trainer
        self.checkpoint, self.model = folder / "step_1", folder / "final"

    def save_checkpoint(self) -> None:
        """Save weights, optimizer and random states, and flush them to the disk."""
        staging = self.checkpoint.with_name("staging")
        (staging / "policy").mkdir(parents=True)
        self._trainer.start_checkpoint(staging / "policy", with_optimizer=True)
        problem = self._trainer.finish_checkpoint()
        assert problem is None, problem
        checksums.write_inventory(staging)
        put_in_place(staging, self.checkpoint, self.checkpoint.with_name("replaced"))

    def load_checkpoint(self) -> None:
        """Load all of it."""
        self._trainer.load_checkpoint(self.checkpoint / "policy", with_optimizer=True)

    def save_model(self) -> None:
        """Save the weights as safetensors files."""
        self._trainer.save_weights(self.model, {})

    def load_model(self) -> None:
        """Load the weights from safetensors files."""
        load_weights(self._trainer.chunks, self._trainer.config, self._trainer.hf_config, self.model)


def cached_share(folder: Path) -> float:
    """Return the share of the pages of a folder's files in the page cache."""
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    num_cached = num_pages = 0
    for path in folder.rglob("*"):
        if not path.is_file() or not path.stat().st_size:
            continue
        # Writable and private, since Python does not give the address of a read-only mapping.
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
            pages = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
            start = ctypes.c_ubyte.from_buffer(mapped)
            failed = mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(mapped)), pages)
            del start  # or the mapping could not be closed
            if failed:
                raise OSError(ctypes.get_errno(), f"mincore of {path}")
            num_cached += sum(page & 1 for page in pages)
            num_pages += len(pages)
    return num_cached / max(num_pages, 1)


def to_disk_alone(folder: Path) -> None:
    """Flush a folder's files to the disk and drop them from the page cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def into_memory(folder: Path) -> None:
    """Load a folder's files into the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.read_bytes()


def seconds(action: Callable[[], None]) -> tuple[float, float]:
    """Return the wall-clock and CPU seconds of an action."""
    began, cpu_began = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - began, time.process_time() - cpu_began


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and its 95% confidence interval (by order statistics)."""
    ordered, count = sorted(values), len(values)
    below, outside = 0, 0.5**count
    while below + 1 < count / 2 and outside + math.comb(count, below + 1) * 0.5**count <= 0.025:
        below += 1
        outside += math.comb(count, below) * 0.5**count
    return statistics.median(ordered), ordered[below], ordered[count - 1 - below]


def compared(action: Callable[[], None], prepare: Callable[[], None], folder: Path, num_rounds: int) -> dict[str, Any]:
    """Return the ratios of an action with checksums to the action without.

    Args:
        prepare: Called before each measurement, not timed.
        num_rounds: Pairs of measurements.
    """
    rounds, took, added, cached = [], [], [], 0.0
    for number in range(num_rounds):
        found = {}
        for is_on in (True, False) if number % 2 else (False, True):
            prepare()
            cached = max(cached, cached_share(folder))
            with contextlib.nullcontext() if is_on else without_checksums():
                found[is_on] = seconds(action)
        took.append(found[True][0])
        added.append(found[True][0] - found[False][0])
        rounds.append([on / off for on, off in zip(found[True], found[False], strict=True)])
    wall, cpu = (median_interval(ratios) for ratios in zip(*rounds, strict=True))
    names = ("ratio", "low", "high", "cpu_ratio", "cpu_low", "cpu_high")
    ratios = {name: round(value, 3) for name, value in zip(names, (*wall, *cpu), strict=True)}
    medians = {"seconds": round(statistics.median(took), 3), "added_seconds": round(statistics.median(added), 3)}
    return ratios | medians | {"cached": round(cached, 3)}


def measure(forms: SavedForms, num_rounds: int) -> dict[str, Any]:
    """Return the ratios of saving and loading both formats."""
    result: dict[str, Any] = {}
    for name, path, save, load in (
        ("training_checkpoint", forms.checkpoint, forms.save_checkpoint, forms.load_checkpoint),
        ("exported_model", forms.model, forms.save_model, forms.load_model),
    ):
        save()  # imports, and the optimizer's state

        def make_room(path: Path = path) -> None:
            shutil.rmtree(path, ignore_errors=True)
            os.sync()

        saving = compared(save, make_room, path, num_rounds)
        make_room()
        save()  # with checksums, which the last measured call may have skipped
        load()
        result[name] = {
            "megabytes": round(sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / 1e6, 1),
            "save": saving,
            "load_cold": compared(load, partial(to_disk_alone, path), path, num_rounds),
            "load_warm": compared(load, partial(into_memory, path), path, num_rounds),
        }
    return result


def seconds_to_first_step(model: Path, folder: Path) -> float:
    """Return the seconds from a command to the metrics of its first step, with an exported model not in the cache."""
    folder.mkdir()
    record = {"prompt": "1+2=", "completion": "3"}
    (folder / "data.jsonl").write_text(f"{json.dumps(record)}\n" * 64)
    words = [
        *(f"policy.model_name={model}", f"policy.tokenizer.name={REPOSITORY}/examples/assets/tiny_qwen3_moe"),
        *("policy.init=pretrained", "cluster.cpu_workers_per_node=1", "policy.train_micro_batch_size=1"),
        *("policy.train_global_batch_size=8", f"data.train.path={folder}/data.jsonl", "data.validation=null"),
        *("sft.max_num_steps=1", "checkpointing.enabled=false", f"logger.log_dir={folder}/logs"),
        *("logger.tensorboard_enabled=false", "logger.wandb_enabled=false", "logger.mlflow_enabled=false"),
    ]
    to_disk_alone(model)
    began = time.time()
    command = [sys.executable, "-m", "nemo_rl_moe.cli", "sft", "--config", "sft_tiny_moe.yaml", *words]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    (metrics,) = folder.glob("logs/*/metrics.jsonl")
    return metrics.stat().st_mtime - began


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, EXAMPLES)
    parser.add_argument("--rounds", type=positive, default=12, help="pairs of measurements of each kind (default: 12)")
    parser.add_argument("--hidden-size", type=positive, default=512, help="the model's width (default: 512)")
    parser.add_argument("--cores", type=positive, default=1, help="processor cores that may be used (default: 1)")
    parser.add_argument("--starts", type=not_negative, default=0, help="starts of runs to measure too (default: 0)")
    options = parser.parse_args(arguments)
    confine(options.cores)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder, width = Path(name, "model"), options.hidden_size
        num_parameters = write_model(folder, hidden_size=width, moe_intermediate_size=2 * width)
        with trainer_of(folder) as trainer:
            forms = SavedForms(trainer, Path(name))
            result = measure(forms, options.rounds)
        if options.starts:
            shutil.copy(folder / "config.json", forms.model)
            took = [seconds_to_first_step(forms.model, Path(name, f"start_{k}")) for k in range(options.starts)]
            start, added = statistics.median(took), result["exported_model"]["load_cold"]["added_seconds"]
            result["start"] = {"seconds": round(start, 2), "share": round(added / start, 4)}
    sizes = {"parameters": num_parameters, "rounds": options.rounds, "cores": options.cores}
    print(json.dumps({"benchmark": "checksums"} | sizes | result))


if __name__ == "__main__":
    main()
