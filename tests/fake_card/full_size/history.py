# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What torch's allocator has handed out at a moment of a phase, and which lines of Python asked for it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

Event = dict[str, Any]
_HEAD = "/chunked_head.py"
_PASSING = ("/site-packages/torch/", "/tests/fake_card/host_kernels.py", "/contextlib.py")
"""Parts of files through which each allocation passes."""
_MOST_EVENTS = 2_000_000


@dataclass(frozen=True)
class Block:
    """An allocation.

    Attributes:
        lines: Innermost first, each as `file.py:function`.
    """

    address: int
    size: int
    lines: tuple[str, ...]

    @classmethod
    def of(cls, event: Event) -> "Block":
        frames = [each for each in event.get("frames", ()) if not any(part in each["filename"] for part in _PASSING)]
        lines = tuple(f"{each['filename'].rpartition('/')[2]}:{each['name']}" for each in frames)
        return cls(event["addr"], event["size"], lines)


@dataclass
class Phase:
    """Memory in a phase, in bytes, once it has ended.

    Attributes:
        held: Allocated at the end.
        blocks: Allocations when the output layer has the most, or at the fullest moment of a phase without it.
    """

    peak: int = 0
    held: int = 0
    reserved: int = 0
    blocks: tuple[Block, ...] = ()


class History:
    """The allocations of this process on its card, phase by phase. Make it before anything is allocated."""

    def __init__(self) -> None:
        self._held: dict[int, Event] = {}
        self._record()

    @contextmanager
    def phase(self) -> Iterator[Phase]:
        """A frame around a phase."""
        for event in self._take():
            _apply(self._held, event)
        torch.cuda.reset_peak_memory_stats()
        found = Phase()
        yield found
        events = self._take()
        fullest = at_peak(self._held, events)
        compared = at_peak(self._held, events, _size_in_head) if any(map(_size_in_head, events)) else fullest
        for event in events:
            _apply(self._held, event)
        self._round_up()
        found.blocks = tuple(map(Block.of, compared))
        found.peak, found.held = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        found.reserved = torch.cuda.max_memory_reserved()
        unexplained = found.peak - sum(event["size"] for event in fullest)
        assert 0 <= unexplained < found.peak / 500, unexplained

    def _take(self) -> list[Event]:
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        assert len(events) < _MOST_EVENTS
        self._record()
        return list(events)

    def _round_up(self) -> None:
        """Give allocations that are still held the size that the allocator counts, which it may have rounded up."""
        blocks = (block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"])
        for block in blocks:
            if block["address"] in self._held:
                self._held[block["address"]]["size"] = block["size"]

    def _record(self) -> None:
        torch.cuda.memory._record_memory_history(
            "all", context="alloc", stacks="python", max_entries=_MOST_EVENTS, clear_history=True
        )


def _size(event: Event) -> int:
    return int(event["size"])


def _size_in_head(event: Event) -> int:
    is_of_head = event["action"] == "alloc" and any(_HEAD in each["filename"] for each in event.get("frames", ()))
    return _size(event) if is_of_head else 0


def at_peak(held: Mapping[int, Event], events: Iterable[Event], counted: Callable[[Event], int] = _size) -> list[Event]:
    """Return the allocations at the fullest moment, the first of several.

    Args:
        held: Allocations before the events, by address.
        counted: Bytes of an allocation that count.
    """
    events = list(events)
    sizes = {address: counted(event) for address, event in held.items()}
    now = most = sum(sizes.values())
    last = 0
    for number, event in enumerate(events, 1):
        if event["action"] == "alloc":
            sizes[event["addr"]] = counted(event)
            now += sizes[event["addr"]]
        elif event["action"] == "free_requested":
            now -= sizes.pop(event["addr"])
        if now > most:
            most, last = now, number
    at_last = dict(held)
    for event in events[:last]:
        _apply(at_last, event)
    return list(at_last.values())


def _apply(held: dict[int, Event], event: Event) -> None:
    if event["action"] == "alloc":
        held[event["addr"]] = event
    elif event["action"] == "free_requested":
        del held[event["addr"]]
