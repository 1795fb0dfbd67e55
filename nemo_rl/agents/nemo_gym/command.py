"""The command that starts NeMo Gym's servers: where its program is, and which overrides it gets.

It is used before anything large is imported.
"""

import json
import os
import re
import shutil
import sysconfig
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl.config import RunConfig
from nemo_rl.config.schema.agents import NEMO_GYM, NemoGymConfig
from nemo_rl.utils.errors import ConfigError

API_KEY = "nemo_rl"
"""API key of the servers: it is no secret, since the endpoint knows only the keys of samples."""
_PLAIN = re.compile(r"[\w./:@+-]+")


def should_use_nemo_gym(master_config: RunConfig) -> bool:
    """Return whether agents of NeMo Gym play rows of a run."""
    return any(name == NEMO_GYM for _, name in master_config.env_entries())


def find_program(section: NemoGymConfig) -> str:
    """Return the path of the program that starts the servers.

    Raises:
        ConfigError: it is not on this machine.
    """
    program = section.command[0]
    folders = [] if section.uv_venv_dir is None else [os.path.join(section.uv_venv_dir, "bin")]
    places = [*folders, sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]
    found = shutil.which(program, path=os.pathsep.join(places))
    if found is None:
        looked = f"in {folders[0]} and PATH" if folders else "in PATH"
        raise ConfigError(
            f"env.nemo_gym.command starts {program!r}, which is not {looked}. Install NeMo Gym into a Python "
            "environment of its own, and name that environment as env.nemo_gym.uv_venv_dir or the program's path in "
            "env.nemo_gym.command; or start the servers yourself, leave env.nemo_gym.config_paths out, and give their "
            "env.nemo_gym.head_server."
        )
    return os.path.abspath(found)


def overrides(config_paths: Sequence[str], base_url: str, model: str) -> list[str]:
    """Return the command's arguments, in Hydra's grammar.

    Args:
        config_paths: files with the configuration of servers.
        base_url: address of the endpoint, up to `/v1`.
        model: name of the model.
    """
    return [
        f"+config_paths=[{','.join(map(_value, config_paths))}]",
        f"+policy_base_url={_value(base_url)}",
        f"+policy_api_key={_value(API_KEY)}",
        f"+policy_model_name={_value(model)}",
    ]


def _value(text: str) -> str:
    """Return a text as a value of Hydra's grammar, with quotes where it needs them."""
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def added_config(section: NemoGymConfig, host: str, port: int) -> Mapping[str, Any]:
    """Return the configuration that is added to the files of `config_paths`.

    Args:
        section: the section.
        host: host of the head server.
        port: its port.
    """
    given = {
        "port_range_low": section.port_range_low,
        "port_range_high": section.port_range_high,
        "uv_cache_dir": section.uv_cache_dir,
        "uv_venv_dir": section.uv_venv_dir,
    }
    known = {key: value for key, value in given.items() if value is not None}
    return {**section.servers, **known, "head_server": {"host": host, "port": port}}
