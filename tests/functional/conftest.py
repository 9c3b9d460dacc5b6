# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""One Ray for the files of tests that are marked `shared_ray`, none for the others; and the order of the files."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from nemo_rl_moe.distributed.cluster import RayCluster
from tests.functional import shared_ray
from tests.functional.browser import running_browser
from tests.support.grpo_inputs import cluster_config

# TRL is on the path in `make test-trl` alone.
collect_ignore = [] if find_spec("trl") else ["test_trainer_hooks.py"]

# Files in their order; others come last of their kind. Those with a Ray of their own, or with none, come before all
# that share one: one among the others would end the shared Ray, which takes ten seconds to start. Of each kind the
# longest first: two files run at a time, and the end of all is the end of the longest one that began late.
ORDER = (
    "test_sft_run",
    "test_worker_faults",
    "test_engine_sleep",
    "test_tool_workers",
    "test_run_failures",
    "test_reward_workers",
    "test_memory_monitor",
    "test_watch",
    "test_drills",
    "test_pairs",
    "test_lora_run",
    "test_tool_run",
    "test_distillation_run",
    "test_evaluate",
    "test_agent_run",
    "test_asynchronous_run",
    "test_resume",
    "test_golden_curves",
    "test_grpo_run",
    "test_separate_engine_runs",
    "test_refit",
    "test_critic_run",
    "test_convert",
    "test_damage",
    "test_layouts_through_ray",
    "test_forced_routing",
    "test_rewards_that_fail",
    "test_models_of_ranks",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files that share a Ray behind the others, and of each kind those that take long first."""
    places = {name: place for place, name in enumerate(ORDER)}
    sharing = {item.path for item in items if item.get_closest_marker("shared_ray")}
    items.sort(key=lambda item: (item.path in sharing, places.get(item.path.stem, len(ORDER)), item.path))


@pytest.fixture(scope="module", autouse=True)
def ray_of_the_file(request: pytest.FixtureRequest) -> None:
    """Starts the shared Ray for a file that wants it, and ends it for one that starts its own."""
    if request.node.get_closest_marker("shared_ray"):
        shared_ray.start_shared_ray()
    else:
        shared_ray.end_shared_ray()


@pytest.fixture(scope="module")
def vllm_cluster() -> Iterator[RayCluster]:
    """A Ray of its own for engines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        cluster = RayCluster(cluster_config(1, 0, 2))
        yield cluster
        cluster.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with running_browser() as found:
        yield found


@pytest.fixture(scope="session", autouse=True)
def no_ray_at_the_end() -> Iterator[None]:
    """Leaves no server behind."""
    yield
    shared_ray.end_shared_ray()
