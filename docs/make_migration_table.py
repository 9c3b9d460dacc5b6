# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Prints NeMo-RL's keys from the table that `nemo-rl-moe config --from-nemo-rl` follows: `docs/migrating.md` shows it.

Usage: python docs/make_migration_table.py
"""

from nemo_rl_moe.config.nemo_rl_data import DATASETS
from nemo_rl_moe.config.nemo_rl_keys import ROWS, Row


def reference() -> str:
    """Keys with a counterpart, those without one, and the names of data sets, as Markdown."""
    carried = [row for row in ROWS if row.ours is not None]
    without = [row for row in ROWS if row.ours is None]
    return "\n".join(
        [
            "### Keys with a counterpart\n",
            "| NeMo-RL | here | what differs |\n|---|---|---|",
            *(_line(f"`{row.theirs}`", _ours(row), row.note) for row in carried),
            "\n### Keys without a counterpart\n",
            "| NeMo-RL | why |\n|---|---|",
            *(_line(f"`{row.theirs}`", row.note) for row in without),
            "\n### Names of data sets\n",
            "| `dataset_name` | `path` | records | prompt, answer | to do |\n|---|---|---|---|---|",
            *(
                _line(
                    f"`{name}`",
                    f"`{known.path}`",
                    known.form,
                    f"`{known.prompt_key}`, `{known.answer_key}`",
                    known.to_do,
                )
                for name, known in DATASETS.items()
            ),
            "",
        ]
    )


def _ours(row: Row) -> str:
    return "the same key" if row.ours == row.theirs else f"`{row.ours}`"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    print(reference(), end="")
