# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The step of the action: audits, shows findings in the job's log and summary, and sets its outputs."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

FOUND = 1


def main() -> int:
    """Return the exit code of the step: of the audit, but 0 for findings that are not to fail it."""
    output = Path(os.environ.get("RUNNER_TEMP", ".")) / "routing-audit.json"
    words = [os.environ["AUDIT_PATH"], *shlex.split(os.environ.get("AUDIT_OPTIONS", "")), "--json", str(output)]
    code = subprocess.run([sys.executable, "-m", "nemo_rl_moe.cli", "audit", *words], check=False).returncode
    runs = json.loads(output.read_text(encoding="utf-8")) if code in (0, FOUND) else []
    problems = [f"{run['capture']}: {text}" for run in runs for text in run["problems"]]
    for text in problems:
        print(f"::error title=Routed experts::{text}")
    _append("GITHUB_OUTPUT", f"findings={len(problems)}\njson={output}\n")
    shown = "\n".join(f"- {text}" for text in problems) or "No findings." if runs else "Nothing could be read."
    _append("GITHUB_STEP_SUMMARY", f"### Routed experts\n\n{shown}\n")
    return 0 if code == FOUND and os.environ.get("AUDIT_FAIL") == "false" else code


def _append(variable: str, text: str) -> None:
    """Add text to the file that a runner names."""
    if path := os.environ.get(variable):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(text)


if __name__ == "__main__":
    sys.exit(main())
