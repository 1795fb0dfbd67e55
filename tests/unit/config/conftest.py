"""Small config files in a temporary folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from config_helpers import MINIMAL

WriteYaml = Callable[..., Path]


@pytest.fixture
def write_yaml(tmp_path: Path) -> WriteYaml:
    """Write a mapping or a text as YAML file below tmp_path and return its path."""

    def write(name: str, content: Any) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        return path

    return write


@pytest.fixture
def minimal(write_yaml: WriteYaml) -> Path:
    """A valid CPU configuration."""
    return write_yaml("minimal.yaml", MINIMAL)
