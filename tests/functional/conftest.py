# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""One Ray for the files of tests that are marked `shared_ray`, none for the others; and the longest files first."""

from collections.abc import Iterator

import pytest

from tests.functional import shared_ray

# Seconds of each file on two quiet cores, where it takes more than ten: with two files at a time, the end of the whole
# is the end of the longest one that began last.
SECONDS: dict[str, int] = {}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files that take long first, those that share a Ray side by side."""
    items.sort(key=lambda item: -SECONDS.get(item.path.stem, 0))


@pytest.fixture(scope="module", autouse=True)
def ray_of_the_file(request: pytest.FixtureRequest) -> None:
    """Starts the shared Ray for a file that wants it, and ends it for one that starts its own."""
    if request.node.get_closest_marker("shared_ray"):
        shared_ray.start_shared_ray()
    else:
        shared_ray.end_shared_ray()


@pytest.fixture(scope="session", autouse=True)
def no_ray_at_the_end() -> Iterator[None]:
    """Leaves no server behind."""
    yield
    shared_ray.end_shared_ray()
