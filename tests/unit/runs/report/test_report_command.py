# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
import base64
import hashlib
import html
import json
import os
import re
import stat
from html.parser import HTMLParser
from pathlib import Path

import pytest

from nemo_rl_moe import cli
from nemo_rl_moe.runs.report import command
from nemo_rl_moe.runs.report.command import MOST_BYTES
from tests.support.made_runs import make_run, random_counts

HOSTILE = "</script><!--<script>alert(1)</script><img src=x onerror=alert(2)>&lt;\u2028$policy"


class Reader(HTMLParser):
    """Collects the scripts and the tags of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.tags: list[str] = []
        self.policy = ""
        self._attributes: dict[str, str | None] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        attributes = dict(attrs)
        if attributes.get("http-equiv") == "Content-Security-Policy":
            self.policy = attributes["content"] or ""
        if tag == "script":
            self._attributes = attributes
            self.scripts.append((attributes, ""))

    def handle_data(self, data: str) -> None:
        if self._attributes is not None:
            attributes, text = self.scripts.pop()
            self.scripts.append((attributes, text + data))

    def handle_endtag(self, tag: str) -> None:
        self._attributes = None


def read_page(path: Path) -> Reader:
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    return reader


def test_writes_one_file_beside_the_metrics_and_says_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = random_counts(30, 2, 8, 400)
    quiet = make_run(tmp_path / "quiet", {1: {"train/loss": 1.0}}, counts)
    dead = counts.copy()
    dead[:, 0, 3] = 0
    sick = make_run(tmp_path / "sick", {1: {"train/loss": 1.0}}, dead)
    assert cli.main(["report", str(quiet), "-o", str(tmp_path / "both.html"), str(sick)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"wrote {tmp_path / 'both.html'} (")
    assert lines[1:] == [f"{quiet}: no findings", f"{sick}: 1 finding"]
    assert cli.main(["report", str(sick)]) == 0
    assert (sick / "report.html").stat().st_size < MOST_BYTES
    assert sorted(path.name for path in sick.iterdir() if path.name.startswith(".")) == []


def test_the_page_forbids_requests_and_all_scripts_but_its_own(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {1: {"train/loss": 1.0}})
    assert cli.main(["report", str(run)]) == 0
    reader = read_page(run / "report.html")
    allowed = dict(rule.split(" ", 1) for rule in reader.policy.split("; "))
    assert (allowed["default-src"], allowed["base-uri"], allowed["form-action"]) == ("'none'", "'none'", "'none'")
    assert allowed["img-src"] == "data: blob:"
    assert allowed.keys() == {"default-src", "script-src", "style-src", "img-src", "base-uri", "form-action"}
    (own,) = (text for attributes, text in reader.scripts if "type" not in attributes)
    digest = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
    sources = allowed["script-src"].split()
    assert f"'sha256-{digest}'" in sources
    assert len(sources) == 2
    assert not {"unsafe-inline", "unsafe-eval", "https:", "*"} & set(allowed["script-src"].replace("'", "").split())
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", own)


def test_what_comes_from_a_run_stands_in_the_page_as_data(tmp_path: Path) -> None:
    hostile_sample = {"step": 1, "split": HOSTILE, "sample_id": HOSTILE, "prompt": HOSTILE, "response": HOSTILE}
    run = make_run(
        tmp_path / "<img src=x onerror=alert(3)>",
        {1: {HOSTILE: 1.0, "train/loss": 2.0}},
        config={"sft": {HOSTILE: HOSTILE}},
        in_force={HOSTILE: HOSTILE},
        samples=[hostile_sample],
    )
    plain = make_run(tmp_path / "plain", {1: {"train/loss": 2.0}}, config={"sft": {"a": "b"}})
    outputs = tmp_path / "hostile.html", tmp_path / "plain.html"
    for folder, output in zip((run, plain), outputs, strict=True):
        assert cli.main(["report", str(folder), "--output", str(output)]) == 0
    hostile, harmless = map(read_page, outputs)
    assert hostile.tags == harmless.tags
    assert hostile.policy == harmless.policy
    text = next(text for attributes, text in hostile.scripts if attributes.get("id") == "document")
    assert not set("<>&\u2028") & set(text)
    document = json.loads(text)
    assert HOSTILE in document["keys"]
    assert document["runs"][0]["samples"][0]["response"] == HOSTILE
    assert {"key": f"sft.{HOSTILE}", "values": [HOSTILE], "differ": False} in document["configuration"]
    assert html.escape("<img src=x onerror=alert(3)>") in outputs[0].read_text(encoding="utf-8")


def test_the_same_run_gives_the_same_file(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {1: {"train/loss": 1.0}}, random_counts(3, 2, 4, 50))
    pages = []
    for _ in range(2):
        assert cli.main(["report", str(run)]) == 0
        pages.append((run / "report.html").read_bytes())
    assert pages[0] == pages[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN/nowhere"], "RUN/nowhere: is no folder; expected a run's folder, such as logs/sft/exp_001"),
        (["RUN", "--output", "RUN"], "--output RUN: is a folder; did you mean RUN/report.html?"),
        (["RUN", "--output", "RUN/no/a.html"], "--output RUN/no/a.html: there is no folder RUN/no"),
        (
            ["RUN", "--output", "RUN/metrics.jsonl"],
            "--output RUN/metrics.jsonl: exists and is no report; only a report may be replaced",
        ),
    ],
)
def test_wrong_input_ends_with_one_line_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    run = make_run(tmp_path / "run", {1: {"train/loss": 1.0}})
    before = (run / "metrics.jsonl").read_bytes()
    assert cli.main(["report", *(word.replace("RUN", str(run)) for word in arguments)]) == 2
    assert capsys.readouterr().err == f"error: {message.replace('RUN', str(run))}\n"
    assert (run / "metrics.jsonl").read_bytes() == before


def test_without_plotly_the_user_learns_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    monkeypatch.setattr(command, "_plotly", command._plotly.__wrapped__)
    assert cli.main(["report", str(make_run(tmp_path / "run", {}))]) == 2
    assert "pip install plotly" in capsys.readouterr().err
    assert not (tmp_path / "run" / "report.html").exists()


def test_a_page_above_the_limit_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "MOST_BYTES", 500_000)
    output = make_run(tmp_path / "run", {1: {"train/loss": 1.0}}) / "report.html"
    assert cli.main(["report", str(output.parent)]) == 0
    reported = capsys.readouterr().out.splitlines()[1]
    assert reported == f"{output}: larger than 0.5 MB, the limit for reports; name fewer runs"


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o022, 0o644), (0o002, 0o664)])
def test_the_file_has_the_rights_that_the_user_gives_to_new_files(tmp_path: Path, umask: int, mode: int) -> None:
    folder = make_run(tmp_path / "run", {1: {"train/loss": 1.0}})
    before = os.umask(umask)
    try:
        assert cli.main(["report", str(folder)]) == 0
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    assert stat.S_IMODE((folder / "report.html").stat().st_mode) == mode


@pytest.mark.parametrize("name", ["metrics", "load", "neither"])
def test_a_run_that_has_hardly_begun_has_a_report(tmp_path: Path, name: str) -> None:
    metrics = {1: {"train/loss": 1.0}} if name == "metrics" else {}
    run = make_run(tmp_path / "run", metrics, random_counts(1, 1, 2, 3) if name == "load" else None)
    assert cli.main(["report", str(run)]) == 0
