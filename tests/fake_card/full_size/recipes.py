# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Memory of recipes at full size, beside what `plan` says: python -m tests.fake_card.full_size.recipes.

Prints a table by phase, and one by term for each recipe. --write PAGE writes the first into a page. The exit code is 1
if a peak or a term differs by more than 3%. `plan` has no number for the build and log-probability passes, which take
less than a training step.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fake_card.environment import REPOSITORY, card_environment, shared_folder, transformer_engine_folder

MODELS = "examples/assets/model_configs"
TOLERANCE = 0.03
SMALLEST_TERM = 0.05e9
"""Bytes of the smallest term whose share is looked at."""
NOT_COMPARED = "refit"
"""Each rank that the process plays sends the embedding, which one rank does in a run. So buckets are larger."""
_BEGIN, _END = "<!-- written by make fake-card-recipes -->", "<!-- end -->"

Phase = Mapping[str, Any]


@dataclass(frozen=True)
class Recipe:
    """A shipped recipe.

    Attributes:
        model: Folder of the model's configuration.
        card_gb: Memory of a card that the recipe is for, in 10^9 bytes: by default an H100's.
    """

    name: str
    model: str = "Qwen3-30B-A3B"
    card_gb: int = 85


RECIPES = (
    Recipe("grpo_qwen3_30b_a3b_8xh100"),
    Recipe("grpo_qwen3_30b_a3b_8xh100_r3"),
    Recipe("grpo_qwen3_30b_a3b_2x8xh100"),
    Recipe("grpo_qwen3_30b_a3b_lora"),
    Recipe("sft_qwen3_30b_a3b", card_gb=102),  # 96 GB
    Recipe("grpo_glm_4_7_flash", "GLM-4.7-Flash"),
    Recipe("grpo_glm_4_5_air_lora", "GLM-4.5-Air"),
)


def measured(recipe: Recipe) -> list[Phase]:
    """Run rank 0 of a recipe; return its phases."""
    with shared_folder() as shared, tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        environment = card_environment(
            shared,
            transformer_engine=transformer_engine_folder(Path(sys.prefix)),
            FAKE_CARD_GB=str(recipe.card_gb),
            FAKE_CARD_UNTOUCHED="1",
            FAKE_CARD_ALONE="1",
        )
        command = [sys.executable, "-W", "ignore", "-m", "tests.fake_card.full_size.rank"]
        command += [f"examples/configs/{recipe.name}.yaml", f"{MODELS}/{recipe.model}", str(results)]
        ended = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
        if ended.returncode or not results.is_file():
            raise SystemExit(f"{recipe.name} ended with exit code {ended.returncode}:\n{ended.stderr[-4000:]}")
        phases: list[Phase] = json.loads(results.read_text(encoding="utf-8"))
        return phases


def phase_rows(by_recipe: Mapping[str, Sequence[Phase]]) -> Iterator[list[str]]:
    """Yield a row for each phase: its peak by `plan` and by the allocator with each recipe."""
    named = {recipe: {phase["name"]: phase for phase in phases} for recipe, phases in by_recipe.items()}
    for name in dict.fromkeys(phase["name"] for phases in by_recipe.values() for phase in phases):
        yield [name, *(_peaks(phases[name]) if name in phases else "" for phases in named.values())]


def _peaks(phase: Phase) -> str:
    return f"{_gb(phase['planned_peak']) if phase['planned'] else '-'}/{_gb(phase['peak'])}"


def term_rows(phase: Phase) -> Iterator[list[str]]:
    """Yield a row for each term of a phase."""
    for term in dict.fromkeys((*phase["planned"], *phase["terms"])):
        planned, found = phase["planned"].get(term, 0), phase["terms"].get(term, 0)
        if max(planned, found) >= SMALLEST_TERM / 2:
            yield [term.replace("_", " "), _gb(planned) if term in phase["planned"] else "none", _gb(found)]


def problems_of(recipe: str, phases: Sequence[Phase]) -> Iterator[str]:
    """Yield what differs by more than the tolerance."""
    for phase in phases:
        if not phase["planned"] or phase["name"] == NOT_COMPARED:
            continue
        numbers = {"the peak": (phase["planned_peak"], phase["peak"])}
        numbers |= {term: (planned, phase["terms"].get(term, 0)) for term, planned in phase["planned"].items()}
        for name, (planned, found) in numbers.items():
            if max(planned, found) > SMALLEST_TERM and abs(planned - found) > TOLERANCE * max(planned, found):
                yield f"{recipe}, {phase['name']}: {name}: plan says {_gb(planned)} GB, the allocator {_gb(found)} GB"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]


def main() -> int:
    """Read the command line and run the recipes; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fake_card.full_size.recipes", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="between its two marks")
    options, began = parser.parse_args(), time.monotonic()
    by_recipe = {recipe.name: measured(recipe) for recipe in RECIPES}
    lines = table(["GB: `plan`/allocator", *(f"`{recipe}`" for recipe in by_recipe)], list(phase_rows(by_recipe)))
    print("\n".join(lines))
    for recipe, phases in by_recipe.items():
        (training,) = (phase for phase in phases if phase["name"] == "training step, balanced")
        heads = [f"{recipe}, {training['name']}", "`plan`", "allocator"]
        print("\n".join(["", *table(heads, list(term_rows(training)))]))
    if options.write is not None:
        text = options.write.read_text(encoding="utf-8")
        before, _, rest = text.partition(_BEGIN)
        _, _, after = rest.partition(_END)
        options.write.write_text("\n".join([f"{before}{_BEGIN}", *lines, f"{_END}{after}"]), encoding="utf-8")
    problems = [problem for recipe, phases in by_recipe.items() for problem in problems_of(recipe, phases)]
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"[fake-card] {len(RECIPES)} recipes in {time.monotonic() - began:.0f} s", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
