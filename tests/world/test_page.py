# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""docs/published-templates.md is what `tests.world.make_page` makes, and names nothing wrong."""

from examples.published_packages import PACKAGES
from tests.world.conftest import Published
from tests.world.make_page import PAGE, make_page
from tests.world.spoken import WRONG


def test_the_page_is_the_generated_one(published: Published) -> None:
    for package in PACKAGES:
        published(package.key)
    text = PAGE.read_text(encoding="utf-8")
    assert text == make_page(), "run: python -m tests.world.make_page"
    assert WRONG not in text
