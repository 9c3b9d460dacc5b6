# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The way of one trajectory, for architecture.md: frames from the training loop to the engine, and the files on it.

    python docs/make_call_path.py

Runs one GRPO step of the tiny recipe on this machine, with the stack and the calls of the driver recorded, and prints
Markdown. Frames of Python's own libraries are left out; so is what happens in the workers' processes.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import nemo_rl_moe
from nemo_rl_moe.algorithms.grpo import train_grpo
from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.demo_data import main as make_data
from nemo_rl_moe.distributed.run_process import StopSignals
from nemo_rl_moe.generation.lockstep import LockstepEngine
from nemo_rl_moe.launch.grpo import run_grpo
from nemo_rl_moe.launch.start import RunLaunch
from nemo_rl_moe.launch.training_run import TrainingRun
from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy

PACKAGE = Path(nemo_rl_moe.__file__).parent
REPOSITORY = PACKAGE.parent


class CallPath:
    """The driver's calls between the beginning and the end of the training loop.

    Attributes:
        stacks: Stack of this package's frames at the first call of each function that is looked for, from the loop on.
        files: Files of this package whose functions the loop called, in the order of their first call.
    """

    def __init__(self, loop: CodeType, wanted: dict[CodeType, str]):
        self.stacks: dict[str, list[str]] = {}
        self.files: dict[str, None] = {}
        self._loop, self._wanted = loop, wanted
        self._depth = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Record an event of `sys.setprofile`."""
        code = frame.f_code
        if code is self._loop:
            self._depth += {"call": 1, "return": -1}.get(event, 0)
        if event != "call" or not self._depth or not code.co_filename.startswith(str(PACKAGE)):
            return
        self.files[str(Path(code.co_filename).relative_to(PACKAGE))] = None
        name = self._wanted.get(code)
        if name is not None and name not in self.stacks:
            self.stacks[name] = self._stack(frame)

    def _stack(self, frame: FrameType | None) -> list[str]:
        found = []
        while frame is not None:
            code = frame.f_code
            if code.co_filename.startswith(str(PACKAGE)):
                place = Path(code.co_filename).relative_to(PACKAGE)
                found.append(f"`{code.co_qualname}` ({place}:{code.co_firstlineno})")
            if code is self._loop:
                break
            frame = frame.f_back
        return found[::-1]


def record(wanted: dict[str, Callable[..., Any]], folder: Path) -> CallPath:
    """Run one step and record the driver's calls.

    Args:
        wanted: Functions at whose first call the stack is recorded, by their names here.
        folder: Takes what the run writes.
    """
    make_data(["--output", str(folder / "data")])
    config = load_grpo_config(
        REPOSITORY / "examples" / "configs" / "grpo_tiny_moe.yaml",
        [
            f"policy.model_name={REPOSITORY / 'examples' / 'assets' / 'tiny_qwen3_moe'}",
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
            f"data.train.path={folder / 'data' / 'grpo.jsonl'}",
            "data.validation=null",
            "checkpointing.enabled=false",
            f"logger.log_dir={folder / 'logs'}",
        ],
    )
    path = CallPath(train_grpo.__code__, {function.__code__: name for name, function in wanted.items()})
    with TrainingRun(config, RunLaunch("call path"), StopSignals()) as run:
        sys.setprofile(path)
        try:
            run_grpo(config, run)
        finally:
            sys.setprofile(None)
    return path


def main() -> None:
    """Print the way as Markdown."""
    wanted = {"a request": LockstepEngine.generate, "a batch": MegatronPolicy.generate}
    with tempfile.TemporaryDirectory() as folder:
        path = record(wanted, Path(folder))
    for name, stack in path.stacks.items():
        print(f"\n{len(stack)} frames from the loop to {name} at the engine:\n")
        print("\n".join(f"{number}. {line}" for number, line in enumerate(stack, 1)))
    print(f"\n{len(path.files)} files of the driver in one step:\n")
    print("\n".join(f"- {name}" for name in path.files))


if __name__ == "__main__":
    main()
