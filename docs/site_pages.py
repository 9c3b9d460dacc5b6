# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Paths of the repository's files in the site, and what else changes on a page."""

import html
import posixpath
import re
from collections.abc import Callable, Iterator

PAGES_FROM_ROOT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "DECISIONS.md": "decisions.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages outside of `docs/`, with their path in the site."""
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_MATHEMATICS = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
_SHALLOW_LIST = re.compile(r"^ {1,3}(?:[-*]|\d+\.) .*", re.MULTILINE)
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LIST_WITHIN_PARAGRAPH = re.compile(r"<p>(?:(?!</p>).)*?\n((?:- |\d+\. |\|)(?:(?!</p>).)*?)</p>", re.DOTALL)


def place_in_repository(site_path: str) -> str:
    """The file that a page of the site is made of."""
    for source, page in PAGES_FROM_ROOT.items():
        if page == site_path:
            return source
    return f"docs/{site_path}"


def place_in_site(repository_path: str) -> str:
    """Return the path in the site of a file of the repository."""
    return PAGES_FROM_ROOT.get(repository_path, repository_path.removeprefix("docs/"))


def linked_files(markdown: str, source: str) -> Iterator[str]:
    """The repository's files that a page links to, anchors left out.

    Args:
        markdown: The page.
        source: Its own file, from the repository's root.
    """
    for _, target, _ in _LINK.findall(markdown):
        if is_of_repository(target):
            yield _resolved(target.partition("#")[0], source)


def with_links_of_site(markdown: str, source: str) -> str:
    """The page with links that lead to the same files in the site."""

    def rewritten(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        if not is_of_repository(target):
            return match[0]
        path, hash_sign, anchor = target.partition("#")
        here = posixpath.dirname(place_in_site(source)) or "."
        found = posixpath.relpath(place_in_site(_resolved(path, source)), here)
        return f"{before}{found}{hash_sign}{anchor}{after}"

    return _LINK.sub(rewritten, markdown)


def is_of_repository(target: str) -> bool:
    """Return whether a link leads to a file of the repository; not one to a place on the same page."""
    return not target.startswith(("http://", "https://", "#"))


def with_mathematics(page: str, to_mathml: Callable[..., str]) -> str:
    """An HTML page with its formulas as MathML, which browsers show without a script.

    Args:
        page: As pymdownx.arithmatex leaves it.
        to_mathml: From LaTeX to MathML, given `display` as well.
    """

    def rendered(match: re.Match[str]) -> str:
        display = "block" if match[1] == "div" else "inline"
        return to_mathml(html.unescape(match[2]).strip(), display=display)

    return _MATHEMATICS.sub(rendered, page)


def swallowed_lists(page: str) -> list[str]:
    """Lists and tables of an HTML page that became text because no empty line precedes them."""
    without_code = re.sub(r"<(pre|code)\b.*?</\1>", "", page, flags=re.DOTALL)
    return [match[1].splitlines()[0] for match in _LIST_WITHIN_PARAGRAPH.finditer(without_code)]


def shallow_lists(markdown: str) -> list[str]:
    """Items of inner lists that would land in the outer list: they need four spaces, not two."""
    return [line.strip() for line in _SHALLOW_LIST.findall(_FENCED.sub("", markdown))]


def _resolved(path: str, source: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
