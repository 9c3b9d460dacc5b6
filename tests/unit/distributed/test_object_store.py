# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Objects in Ray's store that outlive the task that has put them."""

import gc
import weakref

import numpy as np

from nemo_rl_moe.distributed.object_store import HELD_S, HeldObjects


class Handle:
    """A handle that nobody else holds."""


def test_an_object_outlives_its_task_for_a_while() -> None:
    now = [0.0]
    objects = HeldObjects(lambda array: Handle(), lambda: now[0])
    first = weakref.ref(objects.put(np.zeros(1)))
    now[0] = HELD_S
    second = weakref.ref(objects.put(np.zeros(1)))
    gc.collect()
    assert first() is not None
    now[0] = HELD_S + 1
    objects.put(np.zeros(1))
    gc.collect()
    assert first() is None
    assert second() is not None
