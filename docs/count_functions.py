# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Functions and files of the package that run in one step of GRPO, in all processes: how much a reader must know.

    python docs/count_functions.py [synchronous] [asynchronous] [--files]

Runs one step of a tiny recipe of each mode on this machine, and records the functions that are entered in the driver
(all its threads, from `train_grpo` on), on rank 0 of training and, where the engine has workers of its own, on rank 0
of these. Validation and checkpoints are off. A function counts once, in whichever processes it runs. Not counted are
class bodies, comprehensions, functions of other packages, and what runs before the loop.
"""

import argparse
import builtins
import sys
import tempfile
import threading
from contextlib import redirect_stdout
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import nemo_rl_moe
from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.demo_data import main as make_data
from nemo_rl_moe.distributed.run_process import StopSignals
from nemo_rl_moe.launch import grpo
from nemo_rl_moe.launch.start import RunLaunch
from nemo_rl_moe.launch.training_run import TrainingRun
from nemo_rl_moe.models.policy.separate_engine import SeparateEngine

REPOSITORY = Path(__file__).parent.parent
RECIPES = {"synchronous": "grpo_tiny_moe.yaml", "asynchronous": "grpo_tiny_moe_async_separate.yaml"}
Function = tuple[str, str, int]
"""File in the package, qualified name, and number of lines."""


class Recorder:
    """Profile function of a process's threads that notes each function of the package that is entered."""

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()
        self._package = f"{Path(nemo_rl_moe.__file__).parent}/"

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Take an event of `sys.setprofile`."""
        if event == "call" and frame.f_code.co_filename.startswith(self._package):
            self.codes.add(frame.f_code)

    def functions(self) -> set[Function]:
        """Return the functions, without class bodies and comprehensions."""
        return {
            (code.co_filename.removeprefix(self._package), code.co_qualname, _num_lines(code))
            for code in self.codes.copy()  # other threads still add some
            if (code.co_flags & 1 and not code.co_name.startswith("<")) or code.co_name == "<lambda>"
        }


def _num_lines(code: CodeType) -> int:
    lines = [line for _, _, line in code.co_lines() if line]
    return max(lines, default=code.co_firstlineno) - code.co_firstlineno + 1


def begin(worker: Any = None) -> None:
    """Begin to record in this process."""
    recorder = Recorder()
    builtins._recorder = recorder  # type: ignore[attr-defined]  # outlives the call, in a worker's process too
    threading.setprofile(recorder)
    sys.setprofile(recorder)


def end(worker: Any = None) -> set[Function]:
    """End the recording in this process; return its functions."""
    sys.setprofile(None)
    threading.setprofile(None)
    found: set[Function] = builtins._recorder.functions()  # type: ignore[attr-defined]
    return found


def record(mode: str, folder: Path) -> dict[str, set[Function]]:
    """Run one step, and return the functions of each process.

    Args:
        mode: One of `RECIPES`.
        folder: Takes what the run writes.
    """
    train_grpo, found = grpo.train_grpo, dict[str, set[Function]]()

    def recorded(config: Any, policy: Any, rollouts: Any, *arguments: Any) -> Any:
        groups = {"rank 0": policy._workers}
        if isinstance(rollouts.engine, SeparateEngine):
            groups["engine"] = rollouts.engine._copies
        for workers in groups.values():
            workers.call_all(begin)
        recorder.codes.clear()
        try:
            return train_grpo(config, policy, rollouts, *arguments)
        finally:
            found["driver"] = recorder.functions()
            found.update({name: workers.call_all(end)[0] for name, workers in groups.items()})

    make_data(["--output", str(folder / "data")])
    config = load_grpo_config(REPOSITORY / "examples/configs" / RECIPES[mode], overrides(folder), check_paths=False)
    run = TrainingRun(config, RunLaunch("functions of a step"), StopSignals())
    begin()  # threads that begin before the loop are recorded in it
    recorder: Recorder = builtins._recorder  # type: ignore[attr-defined]
    try:
        with mock.patch.object(grpo, "train_grpo", recorded), run:
            grpo.run_grpo(config, run)
    finally:
        end()
    return found


def overrides(folder: Path) -> list[str]:
    """Return the settings of one small step."""
    return [
        f"policy.model_name={REPOSITORY / 'examples/assets/tiny_qwen3_moe'}",
        "policy.init=random",
        "grpo.max_num_steps=1",
        "grpo.num_prompts_per_step=2",
        "grpo.num_generations_per_prompt=2",
        "grpo.val_period=0",
        "grpo.val_at_start=false",
        "grpo.val_at_end=false",
        "policy.train_global_batch_size=4",
        "policy.train_micro_batch_size=2",
        "policy.megatron_cfg.scheduler.lr_warmup_iters=0",
        f"data.train.path={folder / 'data/grpo.jsonl'}",
        "data.validation=null",
        "checkpointing.enabled=false",
        f"logger.log_dir={folder / 'logs'}",
    ]


def row(name: str, functions: set[Function]) -> str:
    """Return a row of the table."""
    num_lines = sum(lines for *_, lines in functions)
    return f"| {name} | {len({file for file, *_ in functions})} | {len(functions)} | {num_lines} |"


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(description="Count the functions that run in one step of GRPO.")
    parser.add_argument("modes", nargs="*", help=f"of {', '.join(RECIPES)}; none: both")
    parser.add_argument("--files", action="store_true", help="print the files too, with their functions")
    arguments = parser.parse_args()
    print("| mode, process | files | functions | their lines |\n|---|---:|---:|---:|")
    for mode in arguments.modes or RECIPES:
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):  # the run's own messages
            found = record(mode, Path(folder))
        together = set().union(*found.values())
        for process, functions in (*found.items(), ("together", together)):
            print(row(f"{mode}, {process}", functions))
        if arguments.files:
            for file, name, lines in sorted(together):
                print(f"{file}\t{name}\t{lines}")


if __name__ == "__main__":
    main()
