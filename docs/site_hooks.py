# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What MkDocs does not do by itself: pages from outside of `docs/`, the configuration's keys, and formulas."""

import logging
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
import make_configuration_reference
import make_migration_table
import site_pages

ROOT = Path(__file__).resolve().parent.parent
MADE_TEXTS = {
    "<!-- every key -->": make_configuration_reference.reference,
    "<!-- every key of NeMo-RL -->": make_migration_table.reference,
}
"""Marks in pages, with the functions that make the texts for them."""
# A warning of a logger below `mkdocs` ends a strict build.
_log = logging.getLogger("mkdocs.site_hooks")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages of the repository's root, and the files outside of `docs/` that pages link to."""
    for source, page in site_pages.PAGES_FROM_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    sources = [site_pages.place_in_repository(file.src_uri) for file in files.documentation_pages()]
    linked = {
        found
        for source in sources
        for found in site_pages.linked_files((ROOT / source).read_text(encoding="utf-8"), source)
    }
    for path in sorted(linked):
        place = site_pages.place_in_site(path)
        if files.get_file_from_path(place) is None and (ROOT / path).is_file():
            files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Makes the links those of the site, and puts the tables into the pages that wait for them."""
    source = site_pages.place_in_repository(page.file.src_uri)
    for line in site_pages.shallow_lists(markdown):
        _log.warning("%s: an inner list needs four spaces before it: %s", source, line)
    for place, made in MADE_TEXTS.items():
        if place in markdown:
            markdown = markdown.replace(place, made())
    return site_pages.with_links_of_site(markdown, source)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Makes the formulas MathML."""
    for line in site_pages.swallowed_lists(html):
        _log.warning("%s: a list or table has no empty line before it: %s", page.file.src_uri, line)
    return site_pages.with_mathematics(html, convert)
