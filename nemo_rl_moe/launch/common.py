# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Puts a run together from its configuration: data, workers, loggers, loop. The only place that knows all of them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemo_rl_moe.algorithms.sft import SFTSummary, num_training_steps, train_sft
from nemo_rl_moe.config.resolved import dump_resolved
from nemo_rl_moe.config.schema import MasterConfig, SFTMasterConfig
from nemo_rl_moe.config.schema_run import DataSourceConfig
from nemo_rl_moe.data.dataset import load_sft_dataset
from nemo_rl_moe.data.loader import GlobalBatchLoader, sequential_batches
from nemo_rl_moe.data.tokenizer import load_tokenizer, pad_token_id
from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.distributed.token_batch import TokenBatch
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.loggers.console import ConsoleLogger
from nemo_rl_moe.loggers.expert_load import FOLDER_NAME, ExpertLoadWriter
from nemo_rl_moe.loggers.factory import build_loggers, mlflow_tracking_uri
from nemo_rl_moe.loggers.run_folder import create_run_folder, write_run_files
from nemo_rl_moe.models.hf_files import load_hf_config
from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy

EFFECTIVE_MOE_FILE = "effective_moe_configuration"


def run_sft(config: SFTMasterConfig) -> None:
    """Runs supervised fine-tuning from start to end.

    Everything that can be wrong with the input is found before a worker starts or a file is written.

    Args:
        config: A checked configuration.

    Raises:
        UserError: The model, the tokenizer or the data cannot be used.
        WorkerDiedError: A worker failed.
    """
    console = ConsoleLogger(total_steps=0, live=config.logger.console.live)
    check_model(config, console)
    tokenizer = load_tokenizer(config.policy.tokenizer.name, config.policy.tokenizer.chat_template)
    training = load_dataset(config, config.data.train, tokenizer, console)
    batch_size = config.policy.train_global_batch_size
    padding = pad_token_id(tokenizer)
    loader = GlobalBatchLoader(training, batch_size, padding, config.sft.seed, config.data.shuffle)
    validation = load_dataset(config, config.data.validation, tokenizer, console) if config.data.validation else None

    def validation_batches() -> Iterator[TokenBatch]:
        assert validation is not None
        return sequential_batches(validation, batch_size, padding, config.sft.val_batches)

    num_steps = num_training_steps(config.sft, len(loader))
    console.begin(num_steps)
    with (
        running_cluster(config, console) as cluster,
        running_policy(config, cluster, console, seed=config.sft.seed, num_steps=num_steps) as policy,
    ):
        run_folder = create_run_folder(config.logger.log_dir)
        resolved = dump_resolved(config)
        write_run_files(run_folder, resolved, {EFFECTIVE_MOE_FILE: policy.moe_configuration})
        announce(console, policy.moe_configuration, run_folder)
        with build_loggers(config.logger, run_folder, console) as loggers:
            loggers.log_config(resolved)
            summary = train_sft(
                config.sft,
                policy,
                loader,
                validation_batches if validation else None,
                loggers,
                ExpertLoadWriter(run_folder, console.warn).write,
            )
            weights = save_final_weights(config, policy, run_folder, console)
    console.message(summarise(config, summary, run_folder, weights))


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


def load_dataset(config: MasterConfig, source: DataSourceConfig, tokenizer: Any, console: ConsoleLogger) -> Any:
    """Reads and tokenises one set of samples, and tells what was cut, dropped or skipped.

    Raises:
        DataError: A file is missing or a line cannot be used.
    """
    with console.phase(f"reading {source.path}"):
        dataset = load_sft_dataset(
            source.path,
            source.split,
            tokenizer,
            config.policy.max_total_sequence_length,
            config.data.on_bad_line,
        )
    console.message(dataset.report.summary())
    return dataset


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
    config: MasterConfig, cluster: RayCluster, console: ConsoleLogger, *, seed: int, num_steps: int
) -> Iterator[MegatronPolicy]:
    """Starts the workers, and stops them whatever happens."""
    with console.phase(f"starting {config.cluster.world_size} workers"):
        policy = MegatronPolicy(config, cluster, seed=seed, num_steps=num_steps)
    try:
        yield policy
    finally:
        policy.shutdown()


def announce(console: ConsoleLogger, moe_configuration: Mapping[str, Any], run_folder: Path) -> None:
    """Shows the router settings that are really in force, whoever set them, and where the run is written."""
    in_force = {name: value for name, value in moe_configuration.items() if value is not None and value is not False}
    console.message("MoE configuration in force (null and false left out):")
    for name, value in in_force.items():
        console.message(f"  {name}: {value}")
    for name in sorted(name for name in in_force if name.startswith("moe_router_force_")):
        console.warn(
            f"FORCED ROUTING: policy.megatron_cfg.{name} is {in_force[name]}. The router's own choices are overruled: "
            "this run is a benchmark or a drill, and what it trains is worthless."
        )
    console.message(f"writing to {run_folder}")


def save_final_weights(
    config: MasterConfig, policy: MegatronPolicy, run_folder: Path, console: ConsoleLogger
) -> Path | None:
    """Writes the trained weights as a Hugging Face folder, where the user wants them."""
    if not config.checkpointing.enabled:
        return None
    folder = Path(config.checkpointing.checkpoint_dir or run_folder / "checkpoints") / "final"
    with console.phase("saving the final weights"):
        policy.save_weights(folder)
    return folder


def summarise(config: MasterConfig, summary: SFTSummary, run_folder: Path, weights: Path | None) -> str:
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
    if config.policy.megatron_cfg.track_moe_metrics:
        lines.append(f"  load of every expert          {run_folder / FOLDER_NAME}")
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
