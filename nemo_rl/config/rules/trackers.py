"""Check that the trackers of `logger` can report, without importing them, and that steps can be recorded.

The check of trackers runs before Ray starts, and again when the trackers are made. Invariant: nothing is sent. The
check only opens a connection to an MLflow server.
"""

import configparser
import importlib.util
import netrc
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from nemo_rl.config.rules.broken_rules import Findings
from nemo_rl.config.schema.algorithms.rollout_training import RolloutTrainingConfig
from nemo_rl.config.schema.cluster import ClusterConfig
from nemo_rl.config.schema.logger import LoggerConfig, MlflowConfig
from nemo_rl.config.schema.model.policy import PolicyConfig
from nemo_rl.host.boundary import in_background
from nemo_rl.utils.errors import ConfigError

_INSTALL = {
    "tensorboard": "it comes with nemo_rl",
    "wandb": "it comes with nemo_rl",
    "mlflow": "the extra: uv sync --extra mlflow",
    "swanlab": "the extra: uv sync --extra swanlab",
    "trackio": "the extra: uv sync --extra trackio",
}
_SERVER_S = 5.0
"""Seconds within which an MLflow server must accept a connection."""
_WITHOUT_LOGIN = ("offline", "disabled", "dryrun")
_WITHOUT_SWANLAB_LOGIN = ("offline", "local", "disabled")


def check_trackers(config: LoggerConfig) -> None:
    """Refuse a tracker without its library or login.

    Raises:
        ConfigError: a tracker is on and cannot report.
    """
    for name, how in _INSTALL.items():
        if getattr(config, f"{name}_enabled") and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"logger.{name}_enabled=true needs the package {name}, which is not installed. "
                f"Install it ({how}) or set logger.{name}_enabled=false."
            )
    if config.wandb_enabled and not _has_wandb_login():
        raise ConfigError(
            f"logger.wandb_enabled=true needs a login: there is no API key in WANDB_API_KEY or {_netrc_path()}. "
            "Run `wandb login`, set WANDB_MODE=offline, or set logger.wandb_enabled=false."
        )
    if config.swanlab_enabled and not _has_swanlab_login():
        raise ConfigError(
            "logger.swanlab_enabled=true needs a login: there is no API key in SWANLAB_API_KEY or "
            f"{_swanlab_folder() / '.netrc'}. Run `swanlab login`, set SWANLAB_MODE=offline, or set "
            "logger.swanlab_enabled=false."
        )
    if config.mlflow_enabled:
        _check_mlflow(tracking_address(config.mlflow) or "")


def check_records(
    logger: LoggerConfig, algorithm: RolloutTrainingConfig | None, policy: PolicyConfig, cluster: ClusterConfig
) -> Findings:
    """Check that the steps of a run can be recorded so that a replay repeats them.

    Args:
        algorithm: the section of an algorithm whose steps can be repeated. None for any other algorithm.
    """
    if not logger.record_steps:
        if logger.record_modules:
            yield "logger.record_modules=true adds to the records of logger.record_steps, which is false. Set both."
        return
    if logger.record_modules and policy.dtensor_cfg.compile_layers:
        yield (
            "logger.record_modules=true records the outputs of modules inside the layers, which compiled layers do not "
            "have. Set policy.dtensor_cfg.compile_layers=false, or logger.record_modules=false."
        )
    off = "Set logger.record_steps=false."
    if algorithm is None:
        yield f"logger.record_steps=true records steps of GRPO only; no other algorithm can be replayed. {off}"
        return
    if cluster.rollout_runners:
        yield (
            f"logger.record_steps=true needs the tokens in the driver, but cluster.rollout_runners="
            f"{cluster.rollout_runners} keeps them elsewhere. Use 0. {off}"
        )
    if policy.backend_section is policy.megatron_cfg:
        yield (
            "logger.record_steps=true needs a training backend that shows its gradients; policy.megatron_cfg does not. "
            f"Use policy.dtensor_cfg. {off}"
        )
    elif (stages := policy.backend_section.pipeline_parallel_size) > 1:
        yield (
            "logger.record_steps=true records gradients before the pipeline stages add up those of weights that they "
            f"share, but policy.{policy.backend_key}.pipeline_parallel_size={stages} divides the model into stages. "
            f"Use 1. {off}"
        )


def tracking_address(section: MlflowConfig) -> str | None:
    """Return the address where MLflow stores runs, or None if none is configured."""
    return section.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or None


def _check_mlflow(address: str) -> None:
    if address.startswith(("file:", "/", ".", "~")):
        raise ConfigError(
            f"logger.mlflow.tracking_uri={address!r} is a folder, and MLflow 3 keeps no runs in folders. Give the "
            "address of a server, or a database such as sqlite:///mlflow.db."
        )
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https"):
        return
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        target = (parts.hostname or "", port)
        in_background(lambda: socket.create_connection(target, _SERVER_S).close(), "mlflow-server").result(_SERVER_S)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"logger.mlflow_enabled=true, but no server answers at tracking_uri={address} ({error or 'no answer'}). "
            "Start it (mlflow server), correct logger.mlflow.tracking_uri, or set it to null, which keeps the run in a "
            "database in its own folder."
        ) from error


def _has_wandb_login() -> bool:
    """Return whether W&B needs no API key or finds one."""
    if os.environ.get("WANDB_MODE") in _WITHOUT_LOGIN:
        return True
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    folders = (Path("wandb"), Path(os.environ.get("WANDB_CONFIG_DIR", "~/.config/wandb")).expanduser())
    settings = configparser.ConfigParser(interpolation=None)
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        settings.read(folder / "settings" for folder in folders)
        if settings.get("default", "mode", fallback=None) in _WITHOUT_LOGIN:
            return True
        return netrc.netrc(_netrc_path()).authenticators(host) is not None
    except (OSError, configparser.Error, netrc.NetrcParseError):
        return False


def _has_swanlab_login() -> bool:
    """Return whether SwanLab needs no API key or finds one.

    Files that set more than the key are not checked here.
    """
    if os.environ.get("SWANLAB_MODE") in _WITHOUT_SWANLAB_LOGIN or os.environ.get("SWANLAB_API_KEY"):
        return True
    folder = Path(os.environ.get("SWANLAB_CONFIG_DIR") or "/etc/swanlab")
    settings = [Path(".env"), *Path().glob("swanlab.y*ml"), *folder.glob("*.y*ml")]
    logins = [Path(".swanlab", ".netrc"), _swanlab_folder() / ".netrc"]
    return "SWANLAB_SECRETS_DIR" in os.environ or any(file.is_file() for file in [*settings, *logins])


def _swanlab_folder() -> Path:
    given = os.environ.get("SWANLAB_ROOT") or os.environ.get("SWANLAB_SAVE_DIR")
    return Path(given) if given else Path.home() / ".swanlab"


def _netrc_path() -> str:
    return os.environ.get("NETRC") or str(Path("~/.netrc").expanduser())
