# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts of several environments: shares by weight, an order that repeats, every prompt before any comes again."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_moe.data.mixture import MixtureLoader, environments_by_weight, interleaved
from nemo_rl_moe.data.prompt_records import PromptRecord
from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.data.record_values import RecordError
from nemo_rl_moe.data.records import BadLine
from nemo_rl_moe.data.shared_records import SharedRecords
from nemo_rl_moe.errors import DataError
from tests.support.grpo_fakes import prompts
from tests.unit.data.conftest import refused


def of(name: str, count: int) -> list[Prompt]:
    return [replace(prompt, environment=name) for prompt in prompts(count, name)]


def rounds_of(loader: MixtureLoader, num_epochs: int) -> list[list[str]]:
    return [[prompt.sample_id for prompt in found] for epoch in range(num_epochs) for found in loader.epoch(epoch)]


def test_environments_take_turns_by_their_weights() -> None:
    given_so_far = {"math": 0, "code": 0}
    found = list(islice(environments_by_weight({"math": 3.0, "code": 1.0}, given_so_far), 8))
    # Lacking after 1: math 0.75, code 0.25; after 2: 0.5 each, the first takes it; after 3: 0.25 and 0.75.
    assert found == ["math", "math", "code", "math"] * 2
    assert given_so_far == {"math": 6, "code": 2}


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(1, 300))
@settings(deadline=None)
def test_no_environment_is_ever_far_from_its_share(weights: list[int], number: int) -> None:
    named = {f"env{place}": float(weight) for place, weight in enumerate(weights)}
    counts = dict.fromkeys(named, 0)
    for place, _ in enumerate(islice(environments_by_weight(named, counts), number), start=1):
        for name, weight in zip(named, weights, strict=True):
            assert abs(counts[name] - Fraction(weight, sum(weights)) * place) < max(len(named) - 1, 1)
    assert sum(counts.values()) == number


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=4),
    st.integers(1, 5),
    st.integers(0, 3),
    st.booleans(),
)
@settings(deadline=None)
def test_each_environment_gives_all_of_its_prompts_before_any_comes_again(
    sizes: list[tuple[int, int]], per_step: int, seed: int, shuffle: bool
) -> None:
    datasets = {f"env{place}": of(f"env{place}", size) for place, (size, _) in enumerate(sizes)}
    weights = {f"env{place}": float(weight) for place, (_, weight) in enumerate(sizes)}
    total = sum(map(len, datasets.values()))
    if total < per_step:
        with pytest.raises(DataError, match=r"grpo\.num_prompts_per_step"):
            MixtureLoader(datasets, weights, per_step, seed, shuffle=shuffle)
        return
    loader = MixtureLoader(datasets, weights, per_step, seed, shuffle=shuffle)
    assert len(loader) == total // per_step
    rounds = rounds_of(loader, 3)
    assert len(rounds) == 3 * len(loader)
    assert {len(found) for found in rounds} == {per_step}
    in_order = [sample_id for found in rounds for sample_id in found]
    for name, dataset in datasets.items():
        own = [sample_id for sample_id in in_order if sample_id.startswith(f"{name}:")]
        for start in range(0, len(own) - len(dataset) + 1, len(dataset)):
            assert Counter(own[start : start + len(dataset)]) == Counter(prompt.sample_id for prompt in dataset)


def test_the_order_is_the_same_whatever_epoch_is_asked_for_first() -> None:
    datasets = {"math": of("math", 7), "code": of("code", 4)}

    def loader(seed: int = 5) -> MixtureLoader:
        return MixtureLoader(datasets, {"math": 2.0, "code": 1.0}, 3, seed, shuffle=True)

    whole = rounds_of(loader(), 4)
    for epoch in (3, 1):
        fresh = loader()
        assert [[prompt.sample_id for prompt in found] for found in fresh.epoch(epoch)] == whole[3 * epoch :][:3]
    assert rounds_of(loader(6), 4) != whole
    first, second = whole[:3], whole[3:6]
    assert first != second


def test_environments_with_the_same_prompts_have_different_orders() -> None:
    same = prompts(8)
    loader = MixtureLoader({"one": same, "two": same}, {"one": 1.0, "two": 1.0}, 8, 0, shuffle=True)
    (found, _) = rounds_of(loader, 1)
    assert found[::2] != found[1::2]


def test_the_first_held_out_prompts_are_of_all_environments() -> None:
    found = interleaved({"math": of("math", 6), "code": of("code", 2), "chat": of("chat", 1)})
    # math stands at 1/12, 3/12, ... of the whole, code at 1/4 and 3/4, chat at 1/2; ties in their order.
    expected = ["math", "math", "code", "math", "chat", "math", "math", "code", "math"]
    assert [prompt.environment for prompt in found] == expected


class TestSharedRecords:
    @staticmethod
    def parse(record: object, sample_id: str) -> PromptRecord:
        assert isinstance(record, dict)
        if "bad" in record:
            raise RecordError("bad")
        return PromptRecord(sample_id, ({"role": "user", "content": "?"},), True, record)

    def test_gives_each_environment_its_own_records(self) -> None:
        shared = SharedRecords("extra.task", ("math", "code"))
        lines = [{"extra": {"task": "math"}}, {"extra": {"task": "code"}}, {"extra": {"task": "math"}}]
        parse = shared.parser("math", self.parse)
        found = [parse(line, f"f:{number}") for number, line in enumerate(lines)]
        assert [line.sample_id for line in shared.own(iter(found))] == ["f:0", "f:2"]
        assert not shared.lack("math")
        assert shared.lack("code")

    def test_a_name_that_does_not_exist_ends_the_run_with_the_nearest_right_one(self) -> None:
        parse = SharedRecords("environment", ("math", "code")).parser("code", self.parse)
        assert refused(parse, {"environment": "maths"}, "prompts.jsonl:3") == [
            "prompts.jsonl:3: environment is 'maths', expected an environment of env.mixture: math, code; did you mean"
            " math? (data.environment_key: environment)"
        ]

    def test_a_record_without_a_name_is_a_bad_line(self) -> None:
        parse = SharedRecords("environment", ("math",)).parser("math", self.parse)
        with pytest.raises(RecordError, match=r"the line has no environment \(data.environment_key=environment\)"):
            parse({"task": "math"}, "f:1")

    def test_a_line_that_cannot_be_read_counts_once(self) -> None:
        shared = SharedRecords("environment", ("math", "code"))
        bad = BadLine("f:1", "not valid JSON")
        assert list(shared.own(iter([bad, None]))) == [bad]
        assert list(shared.own(iter([bad, None]))) == []
