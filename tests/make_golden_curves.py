# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes `tests/golden_curves.json` anew: for a change that is meant to give other numbers.

python tests/make_golden_curves.py [REPOSITORY] [--output FILE] [--only NAME ...]

REPOSITORY is a checkout, of this commit or of an older one, whose package runs; this one where none is given.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

_HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(_HERE.parent))

from tests.support.golden_runs import RUNS, run_golden  # noqa: E402


def main() -> None:
    """Make each run once."""
    parser = argparse.ArgumentParser(description="Writes the golden curves anew.")
    parser.add_argument("repository", nargs="?", type=Path, default=_HERE.parent)
    parser.add_argument("--output", type=Path, default=_HERE / "golden_curves.json")
    parser.add_argument("--only", nargs="+", choices=RUNS, help="runs to make again; the others stay in the file")
    arguments = parser.parse_args()
    curves = {}
    if arguments.only:
        curves = json.loads(arguments.output.read_text())
    for name in arguments.only or RUNS:
        with tempfile.TemporaryDirectory() as folder:
            curves[name] = run_golden(name, Path(folder), arguments.repository.resolve())
        print(f"{name}: {len(curves[name])} steps")
    arguments.output.write_text(json.dumps(curves, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
