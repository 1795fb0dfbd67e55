"""Describe a training service without starting it: its address, users and processes, and whether it can start here.

This is `nemo_rl serve --dry-run`. It makes the checks that a start makes before it loads the model. Invariant: nothing
is started, written or downloaded, and a service that cannot start raises the error of its start.
"""

import sys
from pathlib import Path

from nemo_rl.algorithms.setup.memory_forecast import device_bytes
from nemo_rl.commands.dry_run import layout_lines
from nemo_rl.config.runs.service import ServiceMasterConfig
from nemo_rl.launch.checks import (
    Request,
    check_devices,
    check_installed_packages,
    check_model_names,
    check_ray,
    writable_folder,
)
from nemo_rl.models.capacity.hub_configs import with_local_configs
from nemo_rl.serving.models import check_served
from nemo_rl.serving.store.keys import KeyBook
from nemo_rl.utils.addresses import http_address, listener_of


def show_plan(config: ServiceMasterConfig) -> None:
    """Print the description of a service.

    Raises:
        ConfigError: the service cannot start with this configuration on this machine. The message names the key.
    """
    service, request = config.service, Request(config)
    checks = {
        "devices": check_devices(request).found,
        "packages": check_installed_packages(request).found,
        "ray": check_ray(request).found,
        "model": check_model_names(request).found,
    }
    local = with_local_configs(config)
    check_served(local.policy, local.cluster)
    assert local.policy.generation is not None, "checked before"
    checks["adapters"] = f"the ranks train them, and the engine {local.policy.generation.backend} samples with them"
    listener_of("service", service.host, service.port).close()
    checks["address"] = "it is free"
    parts = {
        "Service": service_lines(config),
        "Layout": layout_lines(config, device_bytes(config.cluster)),
        "Checks": [_line(name, found) for name, found in checks.items()],
        "Verdict": ["  it can start here"],
    }
    sys.stdout.write("\n\n".join("\n".join([title, *lines]) for title, lines in parts.items()) + "\n")


def service_lines(config: ServiceMasterConfig) -> list[str]:
    """Return the lines about the address, the users and the files.

    Raises:
        ConfigError: the keys or a folder cannot be used.
    """
    service = config.service
    users = "every key that begins with tml-"
    if service.keys_file is not None:
        names = KeyBook(Path(service.keys_file)).names
        users = f"{len(names)} of {service.keys_file}: {', '.join(names)}"
    logs = "none" if service.log_dir is None else str(writable_folder(service.log_dir, "service.log_dir"))
    return [
        _line("address", http_address(service.host.strip("[]"), service.port)),
        _line("models", ", ".join(config.served_names)),
        _line("users", users),
        _line("state", str(writable_folder(service.state_dir, "service.state_dir"))),
        _line("logs", logs),
        _line("in memory", f"{service.max_resident_models} models and {service.max_resident_samplers} samplers"),
    ]


def _line(name: str, text: str) -> str:
    return f"  {f'{name} ':<14}{text}"
