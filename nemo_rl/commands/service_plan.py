"""Describe a training service without starting it: its address, users, processes and memory, and whether it can start.

This is `nemo_rl serve --dry-run`. It makes the checks of `service_checks`. Invariant: nothing is started, written or
downloaded, and a service that cannot start raises the error of its start.
"""

import sys

from nemo_rl.algorithms.setup.memory_forecast import device_bytes, forecast_memory
from nemo_rl.commands.dry_run import layout_lines, memory_lines
from nemo_rl.commands.service_checks import SERVICE_CHECKS
from nemo_rl.config.runs.service import ServiceMasterConfig
from nemo_rl.launch.checks import Request
from nemo_rl.models.capacity.hub_configs import with_local_configs
from nemo_rl.utils.addresses import http_address


def show_plan(config: ServiceMasterConfig) -> None:
    """Print the description of a service.

    Raises:
        ConfigError: the service cannot start with this configuration on this machine. The message names the key.
        ResourceInsufficientError: it does not fit into the memory.
    """
    checks = {check.name: check.skipped(config) or check.look(Request(config)).found for check in SERVICE_CHECKS}
    device = device_bytes(config.cluster)
    parts = {
        "Service": service_lines(config, checks),
        "Layout": layout_lines(config, device),
        "Memory": memory_lines(config.policy, forecast_memory(with_local_configs(config), device)),
        "Checks": [_line(name, found) for name, found in checks.items()],
        "Verdict": ["  it can start here"],
    }
    sys.stdout.write("\n\n".join("\n".join([title, *lines]) for title, lines in parts.items()) + "\n")


def service_lines(config: ServiceMasterConfig, checks: dict[str, str]) -> list[str]:
    """Return the lines about the address, the users and the files.

    Args:
        checks: what the checks of the service have found, by name.
    """
    service = config.service
    return [
        _line("address", http_address(service.host.strip("[]"), service.port)),
        _line("models", ", ".join(config.served_names)),
        _line("users", checks["users"]),
        _line("state", checks["folder"]),
        _line("logs", service.log_dir or "none"),
        _line("in memory", f"{service.max_resident_models} models and {service.max_resident_samplers} samplers"),
    ]


def _line(name: str, text: str) -> str:
    return f"  {f'{name} ':<14}{text}"
