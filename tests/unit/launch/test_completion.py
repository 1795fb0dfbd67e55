"""The script of `nemo_rl completion` in bash."""

import subprocess

import pytest

from nemo_rl.__main__ import COMMANDS, main
from nemo_rl.commands.completion import SECTIONS
from nemo_rl.launch.programs import PROGRAMS

_ASK = """
compopt() { :; }
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _nemo_rl; echo "${COMPREPLY[*]}"
"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("nemo_rl re", "regrade replay report"),
        ("nemo_rl grpo --c", "--config"),
        ("nemo_rl grpo --config my.yaml pol", "policy."),
        ("nemo_rl sft s", "sft."),
        ("nemo_rl grpo --config p", ""),
        ("nemo_rl report l", ""),
        ("nemo_rl report --o", "--output"),
        ("nemo_rl sft sft.seed = p", ""),
    ],
)
def test_words_are_completed(words: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out + _ASK
    done = subprocess.run(["bash", "-c", script, "bash", *words.split()], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == (expected, "")


def test_all_commands_and_sections_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", "bash"])
    script = capsys.readouterr().out
    assert all(f"*\\ {command.NAME})" in script for command in COMMANDS)
    given = {name: set(program.schema.model_fields) - {"data_plane"} for name, program in PROGRAMS.items()}
    assert {name: set(sections) for name, sections in SECTIONS.items()} == given
