# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What all tests share: an environment that depends on neither the machine nor the user, and the markers by folder."""

import gc
import importlib.metadata
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.support import quick_list

REPOSITORY_ROOT = Path(__file__).resolve().parents[1]

# Set while pytest collects, before any test module imports torch, transformers or Ray, and inherited by processes that
# tests start. One thread each: several ranks share the machine, and more threads would change the order of sums.
os.environ.update(
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    OPENBLAS_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    WANDB_MODE="offline",
    RAY_USAGE_STATS_ENABLED="0",
)

_TESTS = REPOSITORY_ROOT / "tests"
_MODULES_WITH_RANKS = {"tests.support.gloo_ranks", "tests.support.family_parity"}

# Collecting makes 700,000 objects that all stay; looking through them for rubbish takes a quarter of its time.
gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    """Sets how properties are tried: on fewer examples in the quick list, and never by the clock of a busy machine."""
    quick_list.begin(config.option.markexpr)
    hypothesis.settings.register_profile(
        "tests",
        deadline=None,
        derandomize=True,  # what passes once is to pass again
        max_examples=quick_list.examples(100),
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("tests")


def pytest_collection_finish() -> None:
    """Leaves what collecting has made out of later looks for rubbish."""
    gc.freeze()
    gc.enable()


def pytest_report_header() -> str:
    """Names the release that this pass tests: `.ci/run` makes two passes, on different ones."""
    return f"megatron-core: {importlib.metadata.version('megatron-core')}"


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest's selection by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Marks tests by where they lie, so that none can be forgotten, and puts those that start no ranks first.

    `world` is all of `tests/world`, and `functional` all of `tests/functional`; `megatron` is the latter, and every
    file or folder with megatron in its name.
    """
    for item in items:
        place = item.path.relative_to(_TESTS).as_posix()
        is_functional = place.startswith("functional/")
        if place.startswith("world/"):
            item.add_marker(pytest.mark.world)
        if is_functional:
            item.add_marker(pytest.mark.functional)
        if is_functional or "megatron" in place:
            item.add_marker(pytest.mark.megatron)
    yield
    _put_pure_tests_first(config, items)


def _put_pure_tests_first(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts tests of pure functions before those that start ranks, for each pytest-xdist worker.

    Work stealing gives each worker a block of neighbours to begin with, of the same size, and takes from the end of
    another's block later. Each block has its share of both kinds; of those that start ranks it has whole files, because
    the tests of a file share what its ranks have computed once, and the largest first, so that a small one is cut.
    """
    num_workers = int(getattr(config, "workerinput", {}).get("workercount", 1))
    pure: list[pytest.Item] = []
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        (files.setdefault(item.path, []) if _starts_ranks(item) else pure).append(item)
    blocks: list[list[pytest.Item]] = [[] for _ in range(num_workers)]
    for file in sorted(files.values(), key=len, reverse=True):
        min(blocks, key=len).extend(file)
    num_left = len(items)
    items.clear()
    for worker, block in enumerate(blocks):
        size = num_left // (num_workers - worker)
        num_pure = max(0, size - len(block))
        items += pure[:num_pure] + block
        num_left -= num_pure + len(block)
        del pure[:num_pure]


def _starts_ranks(item: pytest.Item) -> bool:
    module = getattr(item, "module", None)
    values = list(vars(module).values()) if module is not None else []
    return any(getattr(value, "__module__", None) in _MODULES_WITH_RANKS for value in values)


@pytest.fixture(scope="session")
def repository_root() -> Path:
    """The folder with `pyproject.toml`."""
    return REPOSITORY_ROOT


@pytest.fixture
def free_port() -> int:
    """A TCP port of this machine that nothing listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def own_alarm() -> Iterator[None]:
    """A process has one alarm, which pytest-timeout uses too: taken from it, and given back."""
    handler = signal.getsignal(signal.SIGALRM)
    left, interval = signal.setitimer(signal.ITIMER_REAL, 0.0)
    yield
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, left, interval)
