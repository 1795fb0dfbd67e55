"""Define `nemo_rl completion bash`, which prints a script for bash, and for zsh with its `bashcompinit`.

The script has the names of commands, options and sections, so pressing the tab key starts no program. Invariant: only
the command lines are imported for it.
"""

import argparse
import re
import sys
from collections.abc import Mapping

NAME = "completion"
SUMMARY = "print a script that completes commands, options and sections in bash"
DESCRIPTION = """Print a script that completes commands, options and sections of a configuration in bash.

Load it in a shell, or in ~/.bashrc, with: eval "$(nemo_rl completion bash)"
In ~/.zshrc this line comes before it: autoload -U compinit bashcompinit && compinit && bashcompinit
"""
_TRAINING = ("policy", "data", "checkpointing", "logger", "cluster", "loss_fn")
SECTIONS: Mapping[str, tuple[str, ...]] = {
    "grpo": (
        *(*_TRAINING, "env", "grpo", "async_rl", "reward_penalties", "effort_levels"),
        *("on_policy_distillation", "teachers"),
    ),
    "ppo": (*_TRAINING, "env", "ppo", "value", "value_loss_fn"),
    "sft": (*_TRAINING, "sft", "teacher", "teachers", "teacher_loss_fn"),
    "dpo": (*_TRAINING, "dpo"),
    "rm": (*_TRAINING, "rm"),
    "distillation": (*_TRAINING, "env", "distillation", "teacher", "teachers"),
    "eval": ("generation", "tokenizer", "eval", "data", "env", "cluster"),
}
"""Sections of the configuration of each program. The schema would name them too, but takes a second to import."""
_SCRIPT = """_nemo_rl() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} names=
  case "$COMP_CWORD ${{COMP_WORDS[1]}}" in
    1\\ *) names="{commands}" ;;
{cases}
  esac
  [[ $before == = || $word == = ]] && names=
  COMPREPLY=($(compgen -W "$names" -- "$word"))
  if [[ $ZSH_VERSION ]]; then
    COMPREPLY=("${{COMPREPLY[@]/%/ }}")
    COMPREPLY=("${{COMPREPLY[@]/%. /.}}")
  elif [[ ${{COMPREPLY[0]}} == *. ]]; then
    compopt -o nospace
  fi
}}
complete -o default ${{ZSH_VERSION:+-o}} ${{ZSH_VERSION:+nospace}} -F _nemo_rl nemo_rl
"""
"""No space follows a section. zsh has no `compopt`, so there the space after other words is a part of them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    parser.add_argument("shell", choices=["bash"], help="the shell")


def main(arguments: argparse.Namespace) -> int:
    """Print the script and return the exit status."""
    parsers: Mapping[str, argparse.ArgumentParser] = arguments.parsers
    cases = "\n".join(_case(name, parser) for name, parser in parsers.items())
    sys.stdout.write(_SCRIPT.format(commands=" ".join(parsers), cases=cases))
    return 0


def _case(name: str, parser: argparse.ArgumentParser) -> str:
    """Return the line of the script for one command."""
    options = re.findall(r"--[\w-]+", parser.format_usage())
    names = " ".join([*options, *(f"{section}." for section in SECTIONS.get(name, ()))])
    # After an option with a value, and for other words, bash completes files.
    dashes = "[[ $word == -* ]] && " if name not in SECTIONS else "[[ $before != --config ]] && "
    return f'    *\\ {name}) {dashes}names="{names}" ;;'
