# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases: online for a user who is logged in, a local offline run for everybody else."""

import netrc
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from nemo_rl_moe.loggers.plain import to_plain

_DEFAULT_HOST_URL = "https://api.wandb.ai"
_MODES_WITHOUT_LOGIN = ("offline", "disabled", "dryrun")
_CREDENTIAL_VARIABLES = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


class WandbLogger:
    """One W&B run in `<run folder>/wandb`; asks nothing, prints nothing, keeps NaN and infinities.

    A user who set `WANDB_MODE` gets that mode. Otherwise the run is online when the user is logged in, and offline
    when not; an offline run contacts nobody and can be uploaded later with `wandb sync`.

    Args:
        run_folder: An existing folder.
        project: The project's name at W&B.
        run_name: The run's name; None leaves it to W&B.
        announce: Is told in one line where the run can be seen.
    """

    name = "wandb"

    def __init__(self, run_folder: Path, project: str, run_name: str | None, announce: Callable[[str], None]):
        mode = choose_mode(os.environ)
        if mode == "offline" or os.environ.get("WANDB_MODE") in _MODES_WITHOUT_LOGIN:
            # W&B's error reports and usage statistics go over the network in offline mode too, unless told not to;
            # it looks at this variable while it is imported.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._run: Any = wandb.init(
            project=project,
            name=run_name,
            dir=str(run_folder),
            mode=mode,
            reinit="create_new",
            # Capturing the console would record every refresh of the live line.
            settings=wandb.Settings(silent=True, console="off"),
        )
        # Asked first, since W&B warns when an offline run is asked for its address.
        if self._run.offline:
            announce(f"W&B run is offline; to upload it: wandb sync {Path(self._run.dir).parent}")
        elif self._run.url:
            announce(f"W&B run: {self._run.url}")

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the step as one row of the run's history."""
        # Committed at once: otherwise the row waits for the next step, and the last one is lost in a crash.
        self._run.log({key: float(value) for key, value in metrics.items()}, step=step, commit=True)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Stores the configuration as the run's config."""
        self._run.config.update(to_plain(config))

    def close(self) -> None:
        """Ends the run; online, waits until it is uploaded."""
        self._run.finish()


def choose_mode(environment: Mapping[str, str]) -> Literal["offline"] | None:
    """The mode to ask of W&B: None where the user's own settings decide, `offline` where nobody is logged in.

    Args:
        environment: The process's environment variables.

    Raises:
        RuntimeError: `WANDB_MODE` asks for an online run and nobody is logged in: W&B would stop and ask for a key.
    """
    chosen = environment.get("WANDB_MODE")
    if chosen in _MODES_WITHOUT_LOGIN or _is_logged_in(environment):
        return None
    if chosen:
        raise RuntimeError(
            f"WANDB_MODE is {chosen!r}, and nobody is logged in: run `wandb login`, or set WANDB_API_KEY"
        )
    return "offline"


def _is_logged_in(environment: Mapping[str, str]) -> bool:
    if any(environment.get(name) for name in _CREDENTIAL_VARIABLES):
        return True
    return _netrc_knows(urlsplit(environment.get("WANDB_BASE_URL") or _DEFAULT_HOST_URL).netloc, environment)


def _netrc_knows(host: str, environment: Mapping[str, str]) -> bool:
    home = Path(environment.get("HOME") or Path.home())
    candidates = [Path(environment["NETRC"])] if environment.get("NETRC") else [home / ".netrc", home / "_netrc"]
    for path in candidates:
        try:
            if netrc.netrc(path).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False
