# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Which commit ran, and what had been changed since."""

import os
import subprocess
from pathlib import Path
from typing import Any

_TIMEOUT_SECONDS = 20


def read_git_state(directory: Path) -> dict[str, Any]:
    """The state of the git checkout around a directory.

    Never fails: where there is no git, or no repository, the result says so. The address of the remote is left out
    on purpose, since it may carry a password.

    Returns:
        `{"available": True, "root", "commit", "branch", "dirty", "untracked_files", "diff_stat"}`, where `commit` is
        None before the first commit and `branch` None for a detached head; or `{"available": False, "reason"}`.
    """
    try:
        root = _git(directory, "rev-parse", "--show-toplevel")
        status = _git(directory, "status", "--porcelain").splitlines()
        commit = _git_or_none(directory, "rev-parse", "--verify", "--quiet", "HEAD")
        return {
            "available": True,
            "root": root,
            "commit": commit,
            "branch": _git_or_none(directory, "symbolic-ref", "--quiet", "--short", "HEAD"),
            "dirty": bool(status),
            "untracked_files": sum(line.startswith("??") for line in status),
            "diff_stat": _git(directory, "diff", "--stat", "HEAD").splitlines() if commit else [],
        }
    except FileNotFoundError:
        return {"available": False, "reason": "git is not installed"}
    except subprocess.CalledProcessError as error:
        return {"available": False, "reason": " ".join(error.stderr.split()) or f"git ended with {error.returncode}"}
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"available": False, "reason": f"git could not be run: {error}"}


def _git(directory: Path, *arguments: str) -> str:
    # Optional locks off: looking at a repository should not disturb a git command that the user runs meanwhile.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    done = subprocess.run(
        ["git", "-C", str(directory), *arguments],
        capture_output=True,
        text=True,
        errors="replace",
        check=True,
        timeout=_TIMEOUT_SECONDS,
        env=environment,
    )
    return done.stdout.rstrip("\n")


def _git_or_none(directory: Path, *arguments: str) -> str | None:
    try:
        return _git(directory, *arguments) or None
    except subprocess.CalledProcessError:
        return None
