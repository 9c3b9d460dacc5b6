# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Pre-commit's checks of files as text: python tests/check_whitespace.py [--header] FILE ...

Files end with one newline and their lines without blanks; with --header, they begin with copyright and licence.
"""

import sys
from pathlib import Path

_HEADER = ("# Copyright (c) 2026 The nemo_rl_moe authors.", "# SPDX-License-Identifier: Apache-2.0")


def problems_of(path: Path, *, header: bool) -> list[str]:
    """One line for each problem."""
    text = path.read_text()
    lines = text.splitlines()
    if header:
        # A script's first line says what runs it.
        first = lines[1:3] if lines[:1] and lines[0].startswith("#!") else lines[:2]
        return [] if tuple(first) == _HEADER else [f"{path}:1: the first two lines are not the header of this project"]
    problems = [f"{path}:{number}: blanks at the end" for number, line in enumerate(lines, 1) if line != line.rstrip()]
    if text and (not text.endswith("\n") or text.endswith("\n\n")):
        problems.append(f"{path}:{len(lines)}: the file does not end with one newline")
    return problems


if __name__ == "__main__":
    names = [word for word in sys.argv[1:] if word != "--header"]
    found = [line for name in names for line in problems_of(Path(name), header="--header" in sys.argv)]
    print("\n".join(found))
    sys.exit(bool(found))
