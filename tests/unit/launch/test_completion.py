"""The script of `nemo_rl completion` in bash, and in zsh where it is installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

from nemo_rl.__main__ import COMMANDS, main
from nemo_rl.commands.completion import SECTIONS
from nemo_rl.launch.programs import PROGRAMS

_ASK = """
compopt() { :; }
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _nemo_rl; echo "${COMPREPLY[*]}"
"""

_ASK_ZSH = r"""
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell 'autoload -U compinit bashcompinit && compinit -u -D && bashcompinit; source ./script; print R""EADY'
zpty -r -m shell line '*READY*'
zpty -w -n shell "$1"$'\tX\x01: "\x05"; print "[D""ONE]"\n'
zpty -r -m shell line '*\[DONE\]*'
print -r -- "$line"
"""
"""Types words, the tab key and an X, puts quotes around the line, so that it runs nothing, and shows the terminal."""


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


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("nemo_rl comp", "nemo_rl completion X"),
        ("nemo_rl grpo --config my.yaml pol", "nemo_rl grpo --config my.yaml policy.X"),
        ("nemo_rl grpo --config my", "nemo_rl grpo --config my_run.yaml"),
    ],
)
def test_words_are_completed_in_zsh(
    words: str, expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    main(["completion", "bash"])
    (tmp_path / "script").write_text(capsys.readouterr().out)
    (tmp_path / "my_run.yaml").touch()
    command = ["zsh", "-f", "-c", _ASK_ZSH, "zsh", words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=30)
    assert expected in done.stdout, done.stdout


def test_all_commands_and_sections_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", "bash"])
    script = capsys.readouterr().out
    assert all(f"*\\ {command.NAME})" in script for command in COMMANDS)
    given = {name: set(program.schema.model_fields) - {"data_plane"} for name, program in PROGRAMS.items()}
    assert {name: set(sections) for name, sections in SECTIONS.items()} == given
