# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""One HTML file that needs nothing but itself.

Its policy for content forbids every request, and every script but those that this package and plotly have written: they
are named by the hashes of their text. What comes from a run stands in it as data alone.
"""

import base64
import hashlib
import html
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template

from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.report.arrays import compressed_text
from nemo_rl_moe.report.page_data import PageData

MARK = "<!DOCTYPE html><!-- nemo-rl-moe report -->"
"""How every report begins."""
_SCRIPTS = (
    "decode.js",
    "words.js",
    "plots.js",
    "charts.js",
    "slider.js",
    "heatmap.js",
    "history.js",
    "tables.js",
    "main.js",
)
_FOLDER = files("nemo_rl_moe.report") / "page"


class PageParts:
    """What is the same in every report."""

    def __init__(self) -> None:
        self._plotly, self._plotly_blob = _plotly()
        sources = [(_FOLDER / name).read_text(encoding="utf-8") for name in _SCRIPTS]
        self._script = "\n".join(['"use strict";', *sources])
        self._style = (_FOLDER / "style.css").read_text(encoding="utf-8")
        self._template = Template((_FOLDER / "page.html").read_text(encoding="utf-8"))

    @property
    def size(self) -> int:
        """Bytes of it."""
        return len(self._plotly_blob) + len(self._script.encode()) + len(self._style.encode()) + 4000

    def page(self, data: PageData) -> str:
        """The whole page."""
        blocks = [_block("plotly", "application/gzip", self._plotly_blob)]
        blocks += [_block(name, "application/gzip", blob) for name, blob in data.blobs.items()]
        blocks.append(_block("document", "application/json", data.text))
        scripts = " ".join(f"'sha256-{_hash(script)}'" for script in (self._script, self._plotly))
        policy = (
            f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; "
            "base-uri 'none'; form-action 'none'"
        )
        return MARK + self._template.substitute(
            policy=html.escape(policy),
            title=html.escape(data.title),
            style=self._style,
            blocks="\n".join(blocks),
            script=self._script,
        )


@cache
def _plotly() -> tuple[str, str]:
    """The script that draws charts: its text, and the same packed."""
    source = _plotly_source()
    return source, compressed_text(source.encode())


def _plotly_source() -> str:
    # The file alone: importing the package takes seconds.
    spec = find_spec("plotly")
    folders = spec.submodule_search_locations if spec is not None else None
    if not folders:
        raise ConfigurationError("report: the charts need plotly: pip install 'nemo-rl-moe[report]'")
    return (Path(next(iter(folders))) / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


def _block(name: str, kind: str, content: str) -> str:
    """Data: a browser does not run a script block of such a kind."""
    return f'<script type="{kind}" id="{name}">{content}</script>'


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
