"""Check whether configurations written for NeMo RL load here, and print the reasons key by key if not.

    python tools/check_nemo_rl_config.py examples/configs/grpo_math_1B.yaml
    python tools/check_nemo_rl_config.py recipe.yaml teacher.model_name=Qwen/Qwen3-4B --algorithm distillation
    python tools/check_nemo_rl_config.py my_run.yaml --write automodel_cfg

The sections of a file show its algorithm unless `--algorithm` names it. Overrides apply to every file. Models, data and
prompts need not be on this machine. The exit status is 1 if a file does not load.

`--write` first changes the name of the section of the PyTorch backend in each file, keys and interpolations alike:
`automodel_cfg` is the name in NeMo RL after 0.8, `dtensor_cfg` the name before and here, where both are read. The key
`_v2`, which NeMo RL refuses under the new name, becomes a comment, and a key again on the way back.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from nemo_rl.config.loading.algorithms import ALGORITHMS, algorithm_of
from nemo_rl.config.loading.all_errors import collect_errors
from nemo_rl.utils.errors import ConfigError

BACKEND_NAMES = ("automodel_cfg", "dtensor_cfg")
_VERSION_KEY = "_v2"


def renamed(text: str, name: str) -> str:
    """Return a YAML file in which the section of the PyTorch backend has one of its two names.

    Everything else, comments and layout included, stays as it is.

    Args:
        text: content of the file.
        name: a name of `BACKEND_NAMES`.
    """
    other = next(candidate for candidate in BACKEND_NAMES if candidate != name)
    root = yaml.compose(text)
    for start, end in sorted(_places(root, other), reverse=True):
        text = text[:start] + re.sub(rf"(?<!\w){other}(?!\w)", name, text[start:end]) + text[end:]
    key = rf"{_VERSION_KEY}: *(?:true|false)\b"
    if name == "automodel_cfg":
        return re.sub(rf"^( *)({key})", r"\1# \2", text, flags=re.MULTILINE)
    return re.sub(rf"^( *)# ({key})", r"\1\2", text, flags=re.MULTILINE)


def _places(node: yaml.Node | None, name: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of each key with a name, and of each text with interpolations."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == name:
                yield key.start_mark.index, key.end_mark.index
            yield from _places(value, name)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _places(item, name)
    elif isinstance(node, yaml.ScalarNode) and "${" in node.value:
        yield node.start_mark.index, node.end_mark.index


def main() -> int:
    """Check each file; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE", help="YAML file, or an override key=value")
    parser.add_argument("--algorithm", choices=ALGORITHMS, help="algorithm of the files; default: by their sections")
    parser.add_argument("--write", choices=BACKEND_NAMES, help="rename the section of the PyTorch backend to this")
    arguments = parser.parse_intermixed_args()
    overrides = [text for text in arguments.files if "=" in text]
    num_refused = 0
    for file in arguments.files:
        if file in overrides:
            continue
        if arguments.write:
            path = Path(file)
            path.write_text(renamed(path.read_text(encoding="utf-8"), arguments.write), encoding="utf-8")
        try:
            algorithm = arguments.algorithm or algorithm_of(file)
            found = collect_errors(file, algorithm, overrides)
        except ConfigError as error:
            algorithm, found = "?", [str(error)]
        print(f"{file} ({algorithm}): {'does not load' if found else 'loads'}")
        for text in found:
            print(f"  - {text}")
        num_refused += bool(found)
    return int(num_refused > 0)


if __name__ == "__main__":
    sys.exit(main())
