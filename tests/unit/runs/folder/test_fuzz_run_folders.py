# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Files of a run's folder that nobody has thought of, through `report`, `watch --once` and the rewind of a resume."""

import base64
import gzip
import json
import random
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from nemo_rl_moe.errors import UserError, report_error
from nemo_rl_moe.routing.agreement.route_identity import RoutingAnomaly
from nemo_rl_moe.routing.findings.reward_signal import FailedResponses
from nemo_rl_moe.routing.metrics.routing_advantage import AdvantageScores
from nemo_rl_moe.runs.folder.folder import read_logger_run_ids, read_run_id
from nemo_rl_moe.runs.loggers.rewind import rewind_run_folder
from tests.support.fuzzing import Case, Output, command, fuzz, mutated_bytes, mutated_json
from tests.support.made_runs import make_run, random_counts, routing_report

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

NUM_STEPS = 12
SCHEMA = pa.schema([("step", pa.int64()), ("layer", pa.int32()), ("expert", pa.int32()), ("count", pa.int64())])
CONFIG = {
    "grpo": {"max_num_steps": 20},
    "policy": {"megatron_cfg": {"expert_model_parallel_size": 2}},
    "logger": {"alerts": {"excess_cv": 0.5}},
}
SAMPLE = {"split": "val", "prompt": "1+1=", "response": "2", "reward": 1.0, "is_correct": True, "num_tokens": 3}
REWIND_TO = 6


@cache
def whole_run() -> Path:
    """A run of twelve steps, made once in a process."""
    folder = Path(mkdtemp(prefix="fuzz_run_")) / "exp_001"
    metrics = {
        step: {"train/loss": 1.0 / step, "train/reward": step / 10, "train/moe/cv_mean": 0.3, "train/grad_norm": 1.0}
        for step in range(1, NUM_STEPS + 1)
    }
    samples = [{**SAMPLE, "step": step, "sample_id": f"d:{number}"} for step in (0, 4, 8, 12) for number in range(2)]
    late = RoutingAnomaly("token", "routes are one token late")
    captures = {step: routing_report([step, 0], anomalies=[late] * (step % 4 == 1)) for step in metrics}
    scores = {step: AdvantageScores((0, 1), torch.randn(2, 4)) for step in metrics}
    counts = random_counts(NUM_STEPS, 2, 4, 50)
    failures = {step: [FailedResponses("train", 3, 8, "ValueError: no (sample d:1)")] for step in range(2, 11)}
    make_run(
        folder, metrics, counts, config=CONFIG, samples=samples, captures=captures, scores=scores, failures=failures
    )
    (folder / "run.json").write_text(json.dumps({"run_id": "abc", "algorithm": "grpo", "created": "2026-01-01"}))
    (folder / "logger_run_ids.json").write_text(json.dumps({"wandb": "abc"}))
    return folder


def _one_line(generator: random.Random, path: Path) -> str:
    lines = path.read_bytes().splitlines()
    number = generator.randrange(len(lines))
    line, what = mutated_json(generator, json.loads(lines[number]))
    lines[number] = line.replace(b"\n", b" ")
    path.write_bytes(b"\n".join(lines) + b"\n")
    return f"line {number + 1}: {what}"


def _its_bytes(generator: random.Random, path: Path) -> str:
    content, what = mutated_bytes(generator, path.read_bytes())
    path.write_bytes(content)
    return what


def _its_tree(generator: random.Random, path: Path) -> str:
    """Changes a file of one JSON object; PyYAML reads JSON too."""
    tree = CONFIG if path.suffix == ".yaml" else json.loads(path.read_text())
    content, what = mutated_json(generator, tree)
    path.write_bytes(content)
    return what


def _yaml_bomb(generator: random.Random, path: Path) -> str:
    lines = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40)]
    path.write_text(generator.choice(["\n".join(lines), "grpo: &g {a: *g}", "[" * 3000, "a: !!python/object:os.x {}"]))
    return path.read_text()[:50]


@cache
def _long_table() -> Path:
    path = Path(mkdtemp(prefix="fuzz_run_")) / "long.parquet"
    table = pa.table(
        {name: pa.repeat(pa.scalar(1, kind), 10**6) for name, kind in zip(SCHEMA.names, SCHEMA.types, strict=True)}
    )
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as file:
        for _ in range(100):
            file.write_table(table)
    return path


def _odd_table(generator: random.Random, path: Path) -> str:
    """Writes a Parquet file of another form, or with other numbers, in place of a step's."""
    table = pq.read_table(path)
    number = table.num_rows
    name = generator.choice(table.column_names)
    column = generator.choice(
        [
            pa.nulls(number),
            pa.array(["a"] * number),
            pa.array([-1] * number),
            pa.array([2**62] * number),
            pa.array([0.5] * number),
            pa.array([float("nan")] * number),
            pa.array([[1]] * number),
            pa.array(range(number)),
            pa.array([1] * (number - 1) + [None]),
        ]
    )
    place = table.column_names.index(name)
    how = generator.randrange(8)
    if how < 4:
        table = table.set_column(place, name, column)
    elif how == 4:
        table = table.drop_columns([name])
    elif how == 5:
        table = table.slice(0, generator.choice([0, 1, number - 1]))
    elif how == 6:
        table = pa.concat_tables([table] * generator.choice([2, 3]))
    else:  # some kilobytes that say that there are a hundred million rows
        shutil.copy(_long_table(), path)
        return "a hundred million rows"
    pq.write_table(table, path, compression=generator.choice(["none", "snappy", "zstd"]))
    return f"{name} of type {column.type}, way {how}"


def _file_names(generator: random.Random, path: Path) -> str:
    name = generator.choice(
        ["steps-00000001-99999999.parquet", "steps-00000009-00000002.parquet", "steps-00000100-00000100.parquet", "x"]
    )
    path.rename(path.with_name(name))
    return name


_CHANGES: dict[str, tuple[Callable[[random.Random, Path], str], ...]] = {
    "metrics.jsonl": (_one_line, _one_line, _one_line, _its_bytes),
    "samples.jsonl": (_one_line, _one_line, _one_line, _its_bytes),
    "config.yaml": (_its_tree, _its_tree, _its_bytes, _yaml_bomb),
    "effective_moe_configuration.json": (_its_tree, _its_bytes),
    "run.json": (_its_tree, _its_bytes),
    "logger_run_ids.json": (_its_tree, _its_bytes),
    "expert_load.parquet": (_odd_table, _odd_table, _its_bytes, _file_names),
    "routing.parquet": (_odd_table, _odd_table, _its_bytes, _file_names),
    "experts_by_advantage.parquet": (_odd_table, _odd_table, _its_bytes, _file_names),
    "routing_anomalies.jsonl": (_one_line, _one_line, _its_bytes),
    "environment_failures.jsonl": (_one_line, _one_line, _its_bytes),
}


def _rewind(folder: Path) -> Callable[[], int]:
    def run() -> int:
        try:
            read_run_id(folder)
            read_logger_run_ids(folder)
            rewind_run_folder(folder, REWIND_TO)
        except UserError as error:
            for problem in error.problems:
                report_error(problem)
            return error.exit_code
        return 0

    return run


def _rewound(folder: Path) -> Callable[[Output], str | None]:
    """Return what is left of later steps, by Python's own reader, or lost of earlier ones."""

    def difference(output: Output) -> str | None:
        for name in ("metrics.jsonl", "samples.jsonl", "routing_anomalies.jsonl", "environment_failures.jsonl"):
            steps = []
            for line in (folder / name).read_bytes().split(b"\n"):
                try:
                    steps.append(json.loads(line)["step"])
                except (ValueError, KeyError, TypeError, RecursionError):
                    continue
            if late := [step for step in steps[-1:] if isinstance(step, int) and step > REWIND_TO]:
                return f"{name} ends with the steps {late}"
        return None

    return difference


def _page_is_whole(page: Path) -> Callable[[Output], str | None]:
    def difference(output: Output) -> str | None:
        text = page.read_text(encoding="utf-8")
        if text.count("</script>") != text.count("<script"):
            return "a script ends early"
        document = re.search(r'<script type="application/json" id="document">(.*?)</script>', text, re.DOTALL)
        if document is None:
            return "the page has no document"
        json.loads(document[1], parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
        for name, blob in re.findall(r'<script type="application/gzip" id="([^"]*)">([^<]*)</script>', text):
            gzip.decompress(base64.b64decode(blob))
            assert name
        return None

    return difference


def _case(generator: random.Random, folder: Path, name: str) -> Case:
    run = Path(shutil.copytree(whole_run(), folder / "exp_001"))
    path = run / name
    if path.is_dir():
        path = generator.choice(sorted(path.iterdir()))
    change = generator.choice(_CHANGES[name])
    what = f"{path.name}: {change.__name__}: {change(generator, path)}"
    how = generator.choice(["report", "report", "watch", "watch", "rewind"])
    if how == "rewind":
        return Case(f"rewind, {what}", _rewind(run), _rewound(run))
    if how == "watch":
        return Case(f"watch, {what}", command("watch", str(run), "--once"))
    page = folder / "report.html"
    return Case(f"report, {what}", command("report", str(run), "--output", str(page)), _page_is_whole(page))


def run_folders(generator: random.Random, folder: Path) -> Case:
    names = [name for name in _CHANGES if name not in ("samples.jsonl", "expert_load.parquet")]
    return _case(generator, folder, generator.choice([*names, "metrics.jsonl"]))


def samples_of_runs(generator: random.Random, folder: Path) -> Case:
    return _case(generator, folder, "samples.jsonl")


def loads_of_runs(generator: random.Random, folder: Path) -> Case:
    return _case(generator, folder, "expert_load.parquet")


def test_run_folders(tmp_path: Path) -> None:
    fuzz(run_folders, tmp_path)


def test_samples(tmp_path: Path) -> None:
    fuzz(samples_of_runs, tmp_path, some_are_refused=False)  # reported, and left out


def test_loads(tmp_path: Path) -> None:
    fuzz(loads_of_runs, tmp_path, some_are_refused=False)
