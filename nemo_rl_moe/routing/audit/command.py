# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`nemo-rl-moe audit`: check the routes of an RL run of any framework."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl_moe.atomic_writes import write_whole
from nemo_rl_moe.errors import DataError, NotCheckedError, RoutesAuditError, printable

if TYPE_CHECKING:
    # The command line starts without torch.
    from nemo_rl_moe.routing.audit.audited_run import AuditedRun
    from nemo_rl_moe.routing.audit.sources import Source

COMPARISONS = ("training", "logprobs")
"""Keys of `AuditedRun.not_checked`, repeated here because the command line starts without its module."""
SUMMARY = (
    "check the routed experts of an RL run of any framework: statistics, agreement, load balance, mismatch, findings"
)
EXAMPLES = """\
A capture folder holds token ids, routed experts and log-probabilities of a run's sequences, step by step; docs/audit.md
describes it, and which files of other frameworks are read: verl, slime, miles, NeMo-RL, AReaL, prime-rl, SkyRL, vLLM,
SGLang, transformers. Nothing in a file is executed. Only PATH is needed: its format is detected.

examples:
  nemo-rl-moe audit my_run/capture                 a capture folder, or the folder of a run of this project with one
  nemo-rl-moe audit dump/rollout_data --model Qwen3-30B-A3B
  nemo-rl-moe audit dump/rollout_data --model Qwen3-30B-A3B --training router_logits --write-capture my_run/capture
  nemo-rl-moe audit my_run/capture --html audit.html --json audit.json
  nemo-rl-moe audit my_run/capture --steps 10:20
  nemo-rl-moe audit my_run/capture --against yesterdays_run/capture

exit code: 0 nothing is wrong in what was checked; 1 routes cannot be right, a line for each finding; 2 nothing can be
read; 4 a comparison of --require could not be made. NOT CHECKED names each comparison that the files do not allow.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "captures", nargs="+", type=Path, metavar="PATH", help="a capture folder, or a framework's files"
    )
    parser.add_argument(
        "--format",
        default="auto",
        metavar="NAME",
        help="format of the files: capture, verl, slime (and miles), "
        "nemo-rl, nemo-rl-trace, areal, prime-rl, skyrl, vllm, sglang, transformers; auto, the default, detects it",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="the model's folder or config.json, from which its numbers of layers and experts are read",
    )
    parser.add_argument(
        "--training", type=Path, metavar="PATH", help="files with the routes of training for the same tokens"
    )
    parser.add_argument(
        "--require",
        action="append",
        default=[],
        choices=COMPARISONS,
        metavar="NAME",
        help=f"exit code 4 if this comparison cannot be made: {' or '.join(COMPARISONS)}; may be given several times",
    )
    parser.add_argument("--against", type=Path, metavar="OTHER", help="compare with another run")
    parser.add_argument(
        "--write-capture", type=Path, metavar="DIR", help="also write the sequences as a capture folder"
    )
    parser.add_argument("--steps", type=_steps, metavar="FIRST:LAST", help="only steps FIRST to LAST (each optional)")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write one HTML file; it opens from disk, without a network"
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write all results as JSON; - prints only the JSON, on standard output",
    )


def run_words(words: Sequence[str]) -> None:
    """Run `nemo-rl-moe audit` with these arguments. Raises the same errors as `run`."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    run(parser.parse_args(words))


def run(options: argparse.Namespace, more: Sequence[str] = ()) -> None:
    """Audit each run, and print the findings.

    Raises:
        DataError: The files contain nothing to audit, or cannot be read.
        RoutesAuditError: Routes are wrong.
        NotCheckedError: A comparison of `--require` could not be made.
    """
    from nemo_rl_moe.routing.audit.adapters.router_shape import read_router_shape
    from nemo_rl_moe.routing.audit.comparison import compared, comparison_json, comparison_lines, distance_lines
    from nemo_rl_moe.routing.audit.dump_files import AUTO, FORMATS, TRACE
    from nemo_rl_moe.routing.audit.page import write_audit_page
    from nemo_rl_moe.routing.audit.r3_trace import (
        lines_of_trace,
        problems_of_trace,
        read_trace,
        trace_files,
        trace_json,
    )
    from nemo_rl_moe.routing.audit.sources import open_source
    from nemo_rl_moe.routing.audit.summary import as_json, lines_of, problems_of
    from nemo_rl_moe.runs.folder.capture_folder import described_by
    from nemo_rl_moe.runs.report.command import check_output

    paths = [*options.captures, *map(Path, more)]
    if options.write_capture is not None and len(paths) > 1:
        raise DataError(
            f"--write-capture {options.write_capture}: got {len(paths)} paths, expected one: a capture is of one run"
        )
    if options.write_capture is not None and described_by(options.write_capture).exists():
        raise DataError(
            f"--write-capture {options.write_capture}: is a capture already, and its sequences would be duplicated;"
            " name another folder"
        )
    if options.against is not None and len(paths) > 1:
        raise DataError(f"--against {options.against}: got {len(paths)} paths, expected one to compare with it")
    if options.against is not None and trace_files(paths[0]):
        raise DataError(f"--against {options.against}: {paths[0]} is a trace, which has no routes to compare")
    if options.format not in FORMATS:
        raise DataError(f"--format: got {options.format!r}, expected one of {', '.join(FORMATS)}")
    model = None if options.model is None else read_router_shape(options.model)
    only_json = options.json is not None and str(options.json) == "-"
    quiet = only_json or not sys.stderr.isatty()

    def show(lines: Sequence[str]) -> None:
        if not only_json:
            print(printable("\n".join(lines)), flush=True)

    if options.html is not None:
        check_output(options.html, "--html")
    found, sources, traces = [], [], []
    for path in [*paths, *([] if options.against is None else [options.against])]:
        is_other = path is options.against
        if not is_other and options.format in (AUTO, TRACE) and trace_files(path):
            traces.append(read_trace(path))
            show(lines_of_trace(traces[-1]))
            continue
        # OTHER may be a capture whatever the format of PATH is.
        kind = AUTO if is_other and described_by(path).is_file() else options.format
        source = open_source(path, kind, model, None if is_other else options.training, options.steps)
        found.append(_audited(path, source, None if is_other else options.write_capture, quiet=quiet))
        sources.append(source)
        show(lines_of(found[-1]))
    comparison = None
    if options.against is not None:
        comparison = compared(found[0], sources[0], found[1], sources[1])
        show(comparison_lines(comparison))
    if options.json is not None:
        text = json.dumps(
            [*(dict(as_json(run)) for run in found), *map(trace_json, traces)]
            if comparison is None
            else [{**as_json(found[0]), "against": comparison_json(comparison)}, as_json(found[1])],
            indent=1,
            allow_nan=False,
        )
        if only_json:
            print(text)
        else:
            try:
                write_whole(options.json, f"{text}\n")
            except OSError as error:
                raise DataError(f"--json {options.json}: cannot be written: {error}") from None
    if options.html is not None:
        write_audit_page(found, options.html, [] if comparison is None else distance_lines(comparison))
    required = set(options.require)
    # Findings of the other run alone are printed, but are no error.
    looked_at = found if comparison is None else found[:1]
    problems = [f"{run.path}: {text}" for run in looked_at for text in problems_of(run)]
    problems += [f"{trace.path}: {text}" for trace in traces for text in problems_of_trace(trace)]
    problems += [] if comparison is None else [f"{found[0].path}: {text}" for text in comparison.problems]
    if problems:
        raise RoutesAuditError(problems)
    unmade = [f"{run.path}: {text}" for run in looked_at for name, text in run.not_checked.items() if name in required]
    unmade += [f"{trace.path}: a trace has no routes, but --require needs routes" for trace in traces if required]
    if unmade:
        raise NotCheckedError([f"--require: NOT CHECKED: {text}" for text in unmade])


def _audited(path: Path, source: "Source", capture: Path | None, *, quiet: bool) -> "AuditedRun":
    from nemo_rl_moe.routing.audit.audited_run import AuditedRun
    from nemo_rl_moe.routing.audit.auditor import audit_step
    from nemo_rl_moe.routing.audit.history import RunHistory
    from nemo_rl_moe.runs.folder.capture_folder import CaptureFolderWriter

    if capture is not None and source.sequences is None:
        raise DataError(f"--write-capture {capture}: {path} is a capture already")
    writer = None if capture is None else CaptureFolderWriter(capture, source.description)
    audited, history = [], RunHistory(source.description)
    for number, (step, read) in enumerate(source.read.items(), start=1):
        if not quiet:
            print(f"\r{path}: step {step} ({number} of {len(source.read)})", end="", file=sys.stderr, flush=True)
        if writer is not None and source.sequences is not None:
            for part in source.sequences[step]():
                writer.write(step, part)
        of_step = audit_step(source.description, step, read(), source.writers, history)
        audited += [of_step] if of_step.num_sequences or not source.unread else []
    if not quiet:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    if not any(step.num_sequences for step in audited):
        raise DataError([*source.unread.values()] or f"{path}: holds no sequence")
    notices = [*source.notices, *(f"not read: {text}" for text in source.unread.values())]
    return AuditedRun(path, source.description, audited, notices, source.writers)


def _steps(text: str) -> tuple[int | None, int | None]:
    first, colon, last = text.partition(":")
    try:
        if not colon:
            return int(first), int(first)
        return int(first) if first else None, int(last) if last else None
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected FIRST:LAST, such as 10:20") from None
