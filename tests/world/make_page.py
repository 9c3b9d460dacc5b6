# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes docs/published-templates.md, the table of published chat templates and what works with each.

python -m tests.world.make_page
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from examples.published_packages import PACKAGES
from tests.world.conversations import KINDS
from tests.world.families import FAMILIES, TRL, Family, Refused
from tests.world.other_templates import other_templates
from tests.world.spoken import ANEW, REFUSED, RIGHT, WRONG, Spoken, call_turn
from tests.world.tokenizers import tokenizer_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "published-templates.md"
_HEAD = """\
# Published chat templates

<!-- Made by `python -m tests.world.make_page` from the packages of `make world`; do not edit. -->

`nemo-rl-moe data --config my_run.yaml` shows how your model speaks and its mask. This page lists the published
templates that the tests try. `make world` downloads them in pinned packages, and `make test-world` compares the trained
pieces with pieces written by hand or with TRL's training templates.

- **chat, thinking, 1 call, 2 calls**: SFT masks such a conversation exactly (yes), or refuses it with a line that
  names a cure (no).
- **user, result**: a rollout continues after an answer with a user's message, or after a call with a tool's result, and
  keeps every sampled token (yes). Or the template renders earlier turns in another way, such as without their thinking,
  and a new training sequence begins (anew). With `env.rewritten_turns: keep` the tokens are kept.
- **calls**: the `env.driver.format` of the template.
"""
_COLUMNS = (*(kind.replace("one call", "1 call").replace("two calls", "2 calls") for kind in KINDS), "user", "result")


def _published(key: str) -> Path:
    (package,) = [package for package in PACKAGES if package.key == key]
    if not package.is_there():
        sys.exit(f"error: .world/{key} is not there: make world downloads it")
    return package.folder


def _code(text: str) -> str:
    """Return a text as code in a cell of a table."""
    return "`" + text.replace("|", "\\|") + "`" if text else ""


def _cells(spoken: Spoken, answer: str, call: str | None = None) -> list[str]:
    """Return the cells of a template, the name of its format of calls last."""
    cells = [spoken.mask(kind)[0] for kind in KINDS]
    cells.append(spoken.followed(answer, by_result=False)[0])
    call = call or call_turn(spoken)
    name, _ = spoken.tool_format()
    cells.append(spoken.followed(call, by_result=True)[0] if call is not None and name != REFUSED else "")
    return [*cells, "" if name == REFUSED else _code(name)]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")


def _family_rows() -> Iterator[str]:
    yield _row("model", "families", "tokenizer", "stop tokens", "thinking", *_COLUMNS, "calls")
    yield "|" + "---|" * (6 + len(_COLUMNS))
    for family in FAMILIES:
        tokenizer = tokenizer_of(family, _published)
        named = [tokenizer.convert_tokens_to_ids(text) for text in family.named]
        spoken = Spoken(tokenizer, named, dict(family.kwargs))
        thinking = spoken.speech.thinking
        yield _row(
            family.row,
            ", ".join(map(_code, family.model_types)),
            "published" if family.tokenizer else "stand-in",
            " ".join(map(_code, spoken.speech.stop_texts)),
            "" if thinking is None else _code(thinking.start),
            *_cells(spoken, _answer(family), family.sampled_call),
        )


def _answer(family: Family) -> str:
    spans = family.spans["chat"]
    assert not isinstance(spans, Refused)
    return spans[-1]


def _other_rows() -> Iterator[str]:
    yield _row("template", *_COLUMNS, "calls")
    yield "|" + "---|" * (2 + len(_COLUMNS))
    for template in other_templates():
        spoken = template.spoken(_published(template.package))
        yield _row(template.name, *_cells(spoken, f"ANS2 y{spoken.speech.turn_end}"))


def make_page() -> str:
    """Return the content of the page."""
    versions = {package.key: f"{package.name} {package.version}" for package in PACKAGES}
    lines = [
        _HEAD,
        "## Supported families",
        "",
        "A stand-in tokenizer has one token for each byte, and the model's special tokens. Thinking is named by its",
        "opening mark. No package has the templates of OLMoE, DeepSeek-V2, GLM-5 and InternVL. GLM-5 is tried with",
        "GLM-4.7-Flash's.",
        "",
        *_family_rows(),
        "",
        "## Other templates",
        "",
        f"From {versions[TRL]} and {versions['llama-cpp-python']}, with stand-in tokenizers. A mask is right if it",
        "has all words of the assistant and no others, and ends with a stop token.",
        "",
        *_other_rows(),
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    PAGE.write_text(make_page(), encoding="utf-8")
    counts = ", ".join(f"{_count(outcome)} {outcome}" for outcome in (RIGHT, ANEW, REFUSED, WRONG))
    print(f"[page] {PAGE.name}: {counts}")
    return 0


def _all_cells() -> list[str]:
    return [cell.strip() for line in PAGE.read_text(encoding="utf-8").splitlines() for cell in line.split("|")]


def _count(outcome: str) -> int:
    return sum(cell == outcome for cell in _all_cells())


if __name__ == "__main__":
    sys.exit(main())
