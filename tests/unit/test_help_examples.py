# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Examples in the command's help and in the documentation: all are parsed, paths are those that runs write.

Examples of `verify` and `audit` are executed; those with `--config` are checked by `test_docs_examples.py` as well.
"""

import json
import re
import shlex
import shutil
import subprocess
from argparse import ArgumentParser
from dataclasses import asdict
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from nemo_rl_moe import cli, training_cli
from nemo_rl_moe.checkpoints import verify as verify_command
from nemo_rl_moe.checksums import accept_files
from nemo_rl_moe.config.files import exemplar_names
from nemo_rl_moe.config.loading import load_any_config
from nemo_rl_moe.routing.audit import command as audit_command
from nemo_rl_moe.runs.folder.capture_folder import CaptureFolderWriter
from nemo_rl_moe.runs.folder.captured_sequences import CaptureDescription, CapturedSequence
from nemo_rl_moe.runs.report.run_findings import thresholds_of
from tests.conftest import REPOSITORY_ROOT
from tests.unit.test_docs_examples import PAGES, commands

AUDIT_EXAMPLES = REPOSITORY_ROOT / "examples" / "audit"


def examples_in(text: str) -> list[list[str]]:
    """Words of each example of a help text, without its explanation and what it is piped into."""
    calls = re.findall(r"^ +nemo-rl-moe (.+)$", re.sub(r" *\\\n *", " ", text), re.MULTILINE)
    return [shlex.split(re.split(r" {2,}| \| | > ", call)[0]) for call in calls]


@cache
def parsers() -> dict[str, ArgumentParser]:
    parser = cli._build_parser(training_cli)
    (named,) = (action.choices for action in parser._actions if action.dest == "command")
    assert isinstance(named, dict)
    return {"": parser, **named}


IN_HELP = [
    (name or "nemo-rl-moe", words) for name, found in parsers().items() for words in examples_in(found.epilog or "")
]
# Of a command's name with some of its options a page speaks; what has all that it needs is an example.
IN_DOCS = [
    (page.name, words)
    for page in PAGES
    for words in commands(page)
    if words[0] in parsers() and any(not word.startswith("-") for word in words[1:]) and words[1] != "--from"
]
WRITTEN = re.compile(r"^(results|logs)/")


@cache
def folders_of_runs() -> dict[str, set[str]]:
    """Folders that runs of the shipped configurations write checkpoints and logs into."""
    found = [load_any_config(name, check_paths=False) for name in exemplar_names()]
    logs = {str(config.logger.log_dir): config.checkpointing.checkpoint_dir for config in found}
    return {
        "results": {str(folder) for folder in logs.values() if folder is not None},
        "logs": set(logs),
        "logs with checkpoints": {folder for folder, checkpoints in logs.items() if checkpoints is None},
    }


def test_there_are_examples() -> None:
    assert {words[0] for _, words in IN_HELP} == {name for name in parsers() if name}
    assert {"verify", "audit", "report", "watch"} <= {words[0] for _, words in IN_DOCS}


@pytest.mark.parametrize("place", sorted({place for place, _ in [*IN_HELP, *IN_DOCS]}))
def test_examples_are_understood(place: str) -> None:
    for words in (words for where, words in [*IN_HELP, *IN_DOCS] if where == place):
        _, rest = parsers()[""].parse_known_args(words)
        assert [word for word in rest if word.startswith("-")] == [], words


def test_paths_of_help_are_those_that_runs_write() -> None:
    written = folders_of_runs()
    for words in (words for _, words in IN_HELP):
        for path in (word.rpartition("=")[2] for word in words if "drill" not in word):
            if found := WRITTEN.match(path):
                of_checkpoints = found[1] == "logs" and words[0] in ("verify", "convert", "generate", "evaluate")
                folders = written["logs with checkpoints" if of_checkpoints else found[1]]
                assert any(path == folder or path.startswith(f"{folder}/") for folder in folders), words
        assert words[0] not in ("report", "watch") or not any(word.startswith("results/") for word in words), words


def test_examples_of_verify_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoints = Path(load_any_config("sft_tiny_moe.yaml", check_paths=False).checkpointing.checkpoint_dir)
    for name in ("step_50", "final"):
        (checkpoints / name).mkdir(parents=True)
        (checkpoints / name / "weights.bin").write_bytes(name.encode())
        accept_files(checkpoints / name)
    calls = examples_in(verify_command.EXAMPLES)
    assert len(calls) == 3
    for words in calls:
        assert cli.main(words) == 0, words


def test_examples_of_audit_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    experts = np.random.default_rng(0).random((39, 2, 8)).argsort(-1)[..., :2].astype(np.int16)
    sequence = CapturedSequence("a", 40, {"token_ids": np.arange(40), "rollout_experts": experts})
    for folder in ("my_run/capture", "yesterdays_run/capture"):
        CaptureFolderWriter(Path(folder), CaptureDescription((0, 1), 8, 2)).write(12, [sequence])
    for source, target in (("model", "Qwen3-30B-A3B"), ("transformers", "router_logits")):
        shutil.copytree(AUDIT_EXAMPLES / source, target)
    shutil.copytree(AUDIT_EXAMPLES / "slime" / "healthy", "dump/rollout_data")
    calls = examples_in(audit_command.EXAMPLES)
    assert len(calls) == 6
    for words in calls:
        if "--write-capture" in words:
            shutil.rmtree(words[words.index("--write-capture") + 1])
        assert cli.main(words) == 0, words
        if "--write-capture" in words:
            shutil.rmtree("my_run/capture")
            shutil.copytree("yesterdays_run/capture", "my_run/capture")


def test_a_page_of_the_report_says_what_a_sudden_finding_needs() -> None:
    """One sentence gave 20 steps alone, beside a finding of experts that were dead for 2."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node to run the page's script with")
    thresholds = json.dumps(asdict(thresholds_of({})))
    script = (REPOSITORY_ROOT / "nemo_rl_moe/runs/report/page/tables.js").read_text()
    program = f"{script}\nconsole.log(thresholdText({thresholds}));"
    done = subprocess.run([node, "-e", program], capture_output=True, text=True, timeout=120, check=True)
    assert "experts dead for 20 steps in a row (2 if this happens suddenly), " in done.stdout
