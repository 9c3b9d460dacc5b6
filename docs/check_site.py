# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks a built site: every link leads somewhere, and no page asks another server for anything.

Usage: python docs/check_site.py build/docs
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# What a browser fetches by itself, not what a reader may click on.
_FETCHED = {
    "script": ("src",),
    "img": ("src", "srcset"),
    "iframe": ("src",),
    "source": ("src", "srcset"),
    "video": ("src", "poster"),
    "audio": ("src",),
    "embed": ("src",),
    "object": ("data",),
    "input": ("src",),
    "image": ("href", "xlink:href"),
    "use": ("href", "xlink:href"),
}
_FETCHED_LINKS = {"stylesheet", "icon", "preload", "prefetch", "modulepreload", "preconnect", "dns-prefetch"}
_IN_STYLES = re.compile(r"""(?:url\(|@import)\s*["']?(https?:)?//""")


@dataclass
class Page(HTMLParser):
    """What of a page can break.

    Attributes:
        path: The file.
        anchors: Places on it that a link can name.
        links: Targets of its links, as written.
        fetched: Files that a browser loads with it, as written.
    """

    path: Path
    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes what an element leads to."""
        values = {name: value for name, value in attrs if value is not None}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and set(values.get("rel", "").split()) & _FETCHED_LINKS:
            self.fetched.append(values.get("href", ""))
        self.fetched += [values[name] for name in _FETCHED.get(tag, ()) if name in values]
        if _IN_STYLES.search(values.get("style", "")):
            self.fetched.append(values["style"])


def problems(site: Path) -> list[str]:
    """Return what is wrong with a site, a line for each problem."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    found = [] if pages else [f"{site}: holds no page"]
    for page in pages.values():
        name = page.path.relative_to(site)
        found += [f"{name}: is fetched from another server: {target}" for target in page.fetched if _leaves(target)]
        local = [target for target in page.fetched if not _leaves(target) and not target.startswith("data:")]
        for target in [*page.links, *local]:
            if _leaves(target) or urlsplit(target).scheme:
                continue
            if why := _why_broken(target, page, pages, site):
                found.append(f"{name}: {target}: {why}")
    return found + list(_fetching_styles(site))


def _leaves(target: str) -> bool:
    return target.startswith(("http://", "https://", "//")) or bool(_IN_STYLES.search(target))


def _why_broken(target: str, page: Page, pages: dict[Path, Page], site: Path) -> str | None:
    parts = urlsplit(target)
    path = unquote(parts.path)
    # The page for what is not found is shown anywhere, so its links start at the site's root.
    start = site if path.startswith("/") else page.path.parent
    file = (start / path.lstrip("/")).resolve() if path else page.path.resolve()
    if file.is_dir():
        file = file / "index.html"
    if not file.is_file():
        return "there is no such file"
    anchor = unquote(parts.fragment)
    # Material's own name for a page's beginning.
    if anchor and anchor != "__skip" and file in pages and anchor not in pages[file].anchors:
        return "the page has no such place"
    return None


def _fetching_styles(site: Path) -> Iterator[str]:
    for path in sorted(site.rglob("*.css")):
        if _IN_STYLES.search(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(site)}: fetches something from another server"


def main() -> int:
    """Prints what is wrong; the exit code is 1 where there is something."""
    (site,) = map(Path, sys.argv[1:])
    found = problems(site)
    for line in found:
        print(f"error: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
