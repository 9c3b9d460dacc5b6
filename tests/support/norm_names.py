# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that name norms as Transformer Engine's modules do, which no host can build, or as Megatron-Core does."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.models.megatron.checkpoint import contents
from nemo_rl_moe.models.megatron.checkpoint.index import check_folder
from tests.support.tiny_model import parallel_job
from tests.support.training_run import RunSettings, build_trainer, shard_of_step

# isort: split
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.transformer_layer import TransformerLayer


def _names_in_transformer_engine(layer: TransformerLayer) -> dict[str, str]:
    """Return the norms of a layer that are no modules of their own in `get_gpt_layer_with_transformer_engine_spec`."""
    names = {}
    if isinstance(layer.self_attention, MultiLatentAttention):
        names["self_attention.q_layernorm.weight"] = "self_attention.linear_q_up_proj.layer_norm_weight"
        names["self_attention.kv_layernorm.weight"] = "self_attention.linear_kv_up_proj.layer_norm_weight"
    else:
        names["input_layernorm.weight"] = "self_attention.linear_qkv.layer_norm_weight"
    if not layer.is_moe_layer:
        names["pre_mlp_layernorm.weight"] = "mlp.linear_fc1.layer_norm_weight"
    return names


@contextmanager
def _of_transformer_engine() -> Iterator[None]:
    original = TransformerLayer.sharded_state_dict

    def renamed(self: TransformerLayer, prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
        found: dict[str, Any] = original(self, prefix, *args, **kwargs)
        fused = _names_in_transformer_engine(self)
        for name, sharded in found.items():
            inner = name.removeprefix(prefix)
            if "layernorm." in inner:  # where the layer spec has given it another name, too
                sharded.key = prefix + fused.get(inner, inner)
        return found

    with patch.object(TransformerLayer, "sharded_state_dict", renamed):
        yield


def save_under_each_name(
    settings: RunSettings, folder: str
) -> tuple[dict[str, set[str]], dict[str, tuple[float, ...]]]:
    """Save the same state four times: with own modules or those of Transformer Engine, and unchanged or not.

    Returns:
        For each way, the names of norms in the checkpoint, and the next step's loss and gradient norm after loading it
        into own modules; those of the run that goes on are under "".
    """
    names, steps = {}, {}
    with parallel_job(settings.policy):
        trainer = build_trainer(settings)

        def train(step: int) -> tuple[float, ...]:
            result = trainer.train([shard_of_step(trainer, settings, step)], sft_loss)
            return result.global_loss, result.grad_norm

        train(0)
        for way in ("own", "own, unchanged", "engine", "engine, unchanged"):
            directory = Path(folder) / way
            directory.mkdir()
            with ExitStack() as stack:
                if "engine" in way:
                    stack.enter_context(_of_transformer_engine())
                if "unchanged" in way:
                    stack.enter_context(patch.object(contents, "plain_norm_name", lambda name: name))
                trainer.start_checkpoint(directory, with_optimizer=True)
                assert trainer.finish_checkpoint() is None
            index, _ = check_folder(directory)
            names[way] = {name for name in index.state_dict_metadata if "norm" in name}
        train(1)
        steps[""] = train(2)
        for way in names:
            trainer.load_checkpoint(Path(folder) / way, with_optimizer=True)
            train(1)
            steps[way] = train(2)
    return names, steps
