# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A pretended machine with GPUs and Transformer Engine, to plan a configuration on a machine without them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer import transformer_config
from megatron.core.transformer.moe import moe_utils

from nemo_rl_moe.models.megatron.model import transformer_engine

_RELEASE = (2, 14)
"""Assumed release of Transformer Engine."""
_KERNELS = (
    (rope_utils, "fused_apply_rotary_pos_emb"),
    (moe_utils, "fused_permute"),
    (moe_utils, "fused_permute_with_probs"),
    (moe_utils, "fused_sort_chunks_by_index"),
    (moe_utils, "fused_sort_chunks_by_index_with_probs"),
    (moe_utils, "fused_unpermute"),
)
"""Names that Megatron-Core's checks look up, and that are unbound or None without Transformer Engine."""


def _has_release(wanted: str, check_equality: bool = True) -> bool:
    found = tuple(int(part) for part in wanted.split(".")[:2] if part.isdecimal())
    return found < _RELEASE or (check_equality and found == _RELEASE)


@contextmanager
def planned_with_gpus() -> Iterator[None]:
    """Let TransformerConfigs be made as on a machine with GPUs, while the context is open.

    No model can be built from them here.
    """
    replaced: list[tuple[Any, str, Any]] = [
        (transformer_engine, "has_transformer_engine", lambda: True),
        (transformer_engine, "release", lambda: _RELEASE),
        (transformer_config, "is_te_min_version", _has_release),
        *((module, name, _not_here) for module, name in _KERNELS if getattr(module, name, None) is None),
    ]
    with ExitStack() as stack:
        for module, name, value in replaced:
            stack.enter_context(patch.object(module, name, value, create=True))
        yield


def _not_here(*arguments: Any, **keywords: Any) -> Any:
    raise RuntimeError(
        "this kernel of Transformer Engine does not exist here: this process only plans a run on a machine with GPUs"
    )
