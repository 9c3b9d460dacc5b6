# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""In place of real cases: each does what its name says, and none computes anything."""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    """Run the cases named, one after the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--here", action="store_true")
    parser.add_argument("--cases", nargs="+")
    options = parser.parse_args()
    for name in options.cases:
        if name == "exits":
            return 7
        if name == "hangs":
            time.sleep(1000)
        if name == "leaves":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
        faults = ["step 1: a token is lost"] if name == "fails" else []
        folder = options.output / name
        folder.mkdir(parents=True)
        staging = folder / "staging"
        staging.write_text(json.dumps({"case": name, "settings": "", "faults": faults, "seconds": 1.0}))
        staging.rename(folder / "result.json")
        if faults:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
