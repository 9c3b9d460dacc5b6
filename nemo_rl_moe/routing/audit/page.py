# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Page of an audit: the report's page, with rollout and training as two runs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nemo_rl_moe.errors import DataError
from nemo_rl_moe.routing.audit.audited_run import AuditedRun, sides_of
from nemo_rl_moe.runs.report.command import write_page
from nemo_rl_moe.runs.report.page_data import PageWords

_WORDS = PageWords("Audit of routes", "The load of the experts is not known: the files have no routes of this side.")


def write_audit_page(runs: Sequence[AuditedRun], output: Path, notes: Sequence[str] = ()) -> None:
    names = [str(run.path) if len(runs) > 1 else "" for run in runs]
    sides = [side for run, name in zip(runs, names, strict=True) for side in sides_of(run, name)]
    if not sides:
        raise DataError(f"--html {output}: there is nothing to show: the files have neither routes nor two log-probs")
    first = replace(sides[0], notes=[*sides[0].notes, *notes])
    write_page([first, *sides[1:]], output, _WORDS)
