# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tools with the types of Python's and Pydantic's classes, and tools with state."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, field_validator
from typing_extensions import TypedDict


class Item(BaseModel):
    """A position of an order."""

    name: str = Field(description="In English.")
    count: int = Field(1, gt=0)

    @field_validator("name")
    @classmethod
    def _not_boom(cls, name: str) -> str:
        return str(1 / 0) if name == "boom" else name


@dataclass
class Address:
    street: str
    title: str = "Dr"


class Speed(Enum):
    SLOW = "slow"
    FAST = "fast"


class Options(TypedDict):
    gift: bool


class Tree(BaseModel):
    children: list["Tree"]


def order(
    items: list[Item],
    address: Address | None = None,
    speed: Speed = Speed.SLOW,
    options: Options = {"gift": False},  # noqa: B006
    days: Annotated[int, Field(ge=0)] = 3,
) -> str:
    """Order things.

    Parameters
    ----------
    items : list of Item
        The positions.
    address
        Where to send it.
    speed : Speed, optional
        Of the delivery.
    options : Options
        More.
    days : int
        Latest day,
        with two lines.

    Returns
    -------
    str
        A sentence.
    """
    return f"{items[0].count} {items[0].name}, {speed.name}, {options['gift']}"


def grow(tree: Tree) -> int:
    """Grow.

    Args:
        tree: A tree.
    """
    return len(tree.children)


class Counter:
    """Counts for one trajectory, and notes its end in a file."""

    def __init__(self, record: Mapping[str, Any], *, first: int = 0, file: str = ""):
        start = record.get("start", 0)
        if start < 0:
            raise ValueError("no negative start")
        self._total, self._file = start + first, file

    async def count(self, by: int = 1) -> int:
        """Count on.

        Args:
            by: How far.
        """
        self._total += by
        return self._total

    def total(self) -> int:
        """Return the number so far."""
        return self._total

    def end_process(self) -> None:
        """End the process."""
        os._exit(3)

    @staticmethod
    def zero() -> int:
        """Return zero."""
        return 0

    @classmethod
    def named(cls) -> str:
        """Return the name."""
        return cls.__name__

    async def close(self) -> None:
        if self._total > 100:
            raise ValueError("too high")
        if self._file:
            with Path(self._file).open("a") as file:
                file.write(f"{self._total}\n")


class NeedsMore:
    def __init__(self, record: Mapping[str, Any], place: str):
        pass

    def count(self) -> int:
        """Return zero."""
        return 0


class other:
    class Counter:
        def reset(self) -> int:
            """Return zero."""
            return 0
