# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What every run needs around its loop: the model checked, workers started and stopped, the end told."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemo_rl_moe.algorithms.loop import RunSummary
from nemo_rl_moe.config.schema import MasterConfig
from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.loggers.console import ConsoleLogger
from nemo_rl_moe.loggers.expert_load import FOLDER_NAME
from nemo_rl_moe.loggers.factory import mlflow_tracking_uri
from nemo_rl_moe.loggers.samples import SAMPLES_FILE_NAME
from nemo_rl_moe.models.hf_files import load_hf_config
from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy

EFFECTIVE_MOE_FILE = "effective_moe_configuration"


def check_model(config: MasterConfig, console: ConsoleLogger) -> None:
    """Builds the TransformerConfig on the driver, so that whatever Megatron-Core refuses is refused before Ray starts.

    Raises:
        ConfigurationError: The model, a field or the layout is not supported, or a folder lacks the weights asked for.
    """
    hf_config = load_hf_config(config.policy.model_name)
    folder = Path(config.policy.model_name)
    if config.policy.init == "pretrained" and folder.is_dir() and not any(folder.glob("*.safetensors")):
        raise ConfigurationError(
            f"policy.init: got 'pretrained', but {folder} holds no *.safetensors file; allowed with it: random"
        )
    with console.phase("checking the model"):
        # Imported here: Megatron-Core takes seconds to import, which the phase tells.
        from nemo_rl_moe.models.megatron.transformer_config import build_transformer_config

        build_transformer_config(config.policy, hf_config)


@contextmanager
def running_cluster(config: MasterConfig, console: ConsoleLogger) -> Iterator[RayCluster]:
    """Starts Ray, or joins a running one, and lets go of it whatever happens."""
    with console.phase("starting Ray"):
        cluster = RayCluster(
            config.cluster.num_nodes, config.cluster.gpus_per_node, config.cluster.cpu_workers_per_node
        )
    try:
        yield cluster
    finally:
        cluster.shutdown()


@contextmanager
def running_policy(
    config: MasterConfig,
    cluster: RayCluster,
    console: ConsoleLogger,
    *,
    seed: int,
    num_steps: int,
    keep_reference: bool = False,
) -> Iterator[MegatronPolicy]:
    """Starts the workers, and stops them whatever happens."""
    with console.phase(f"starting {config.cluster.world_size} workers"):
        policy = MegatronPolicy(config, cluster, seed=seed, num_steps=num_steps, keep_reference=keep_reference)
    try:
        yield policy
    finally:
        policy.shutdown()


def announce(console: ConsoleLogger, moe_configuration: Mapping[str, Any], run_folder: Path) -> None:
    """Shows the router settings that are really in force, and where the run is written."""
    announce_moe(console, moe_configuration)
    console.message(f"writing to {run_folder}")


def announce_moe(console: ConsoleLogger, moe_configuration: Mapping[str, Any]) -> None:
    """Shows the router settings that are really in force, whoever set them."""
    if not moe_configuration:
        console.message("the model has no MoE layers: there is nothing to track")
        return
    in_force = {name: value for name, value in moe_configuration.items() if value is not None and value is not False}
    console.message("MoE configuration in force (null and false left out):")
    for name, value in in_force.items():
        console.message(f"  {name}: {value}")
    for name in sorted(name for name in in_force if name.startswith("moe_router_force_")):
        console.warn(
            f"FORCED ROUTING: policy.megatron_cfg.{name} is {in_force[name]}. The router's own choices are overruled: "
            "this run is a benchmark or a drill, and what it trains is worthless."
        )


def summarise(config: MasterConfig, summary: RunSummary, run_folder: Path, weights: Path | None) -> str:
    """A few lines: what was learned, and where to look."""
    lines = [f"\n{summary.num_steps} steps done."]
    for name in ("loss", "accuracy"):
        if f"val/{name}" in summary.last_validation:
            first, last = summary.first_validation[f"val/{name}"], summary.last_validation[f"val/{name}"]
            lines.append(f"  validation {name}: {first:.4f} -> {last:.4f}")
    if "train/moe/load_balancing_loss" in summary.last_training:
        balance = summary.last_training["train/moe/load_balancing_loss"]
        lines.append(f"  load balancing loss of the last step: {balance:.4f} (1 is perfect balance)")
    lines.append("Where to look:")
    lines.append(f"  every metric, a line a step   {run_folder / 'metrics.jsonl'}")
    if (run_folder / FOLDER_NAME).is_dir():
        lines.append(f"  load of every expert          {run_folder / FOLDER_NAME}")
    samples = run_folder / SAMPLES_FILE_NAME
    if samples.is_file() and samples.stat().st_size:
        lines.append(f"  responses, a line each        {samples}")
    if config.logger.tensorboard_enabled:
        lines.append(f"  TensorBoard                   tensorboard --logdir {config.logger.log_dir}")
    if config.logger.wandb_enabled:
        lines.append(f"  Weights & Biases              {run_folder / 'wandb'} (offline runs: wandb sync FOLDER)")
    if config.logger.mlflow_enabled:
        lines.append(
            f"  MLflow                        mlflow ui --backend-store-uri {mlflow_tracking_uri(config.logger)}"
        )
    if weights is not None:
        lines.append(f"  trained model                 {weights}")
    return "\n".join(lines)
