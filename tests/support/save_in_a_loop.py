# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs that save one checkpoint after the other, each until it is killed: `save_in_a_loop FOLDER`.

Each line that is read starts a run. It says its process id, then each checkpoint that it has published; after its end
comes `ended`.
"""

import os
import sys
from pathlib import Path

from nemo_rl_moe.checkpoints.state import LoopState
from tests.support.saving_run import Run


def save_in_a_loop(folder: Path) -> None:
    """Go on from the newest checkpoint, and never ends."""
    run = Run(folder, "checkpointing.keep_top_k=2")
    with run.store.locked():
        run.store.sweep()
        newest = next(reversed(run.store.checkpoints()), None)
        step = newest.step if newest else 0
        reported = newest.folder if newest else None
        while True:
            step += 1
            run.checkpointer.start(LoopState(step=step), {"val/accuracy": (step * 7 % 5) / 5})
            run.checkpointer.poll(wait=step % 3 == 0)
            published = run.checkpointer.last_published
            if published is not None and published != reported:
                reported = published
                print(published.name, flush=True)


if __name__ == "__main__":
    for _ in sys.stdin:
        child = os.fork()  # quicker than another interpreter
        if child == 0:
            print(os.getpid(), flush=True)
            save_in_a_loop(Path(sys.argv[1]))
        os.waitpid(child, 0)
        print("ended", flush=True)
