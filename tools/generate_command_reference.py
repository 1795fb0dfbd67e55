"""Write docs/reference/commands.md: the `--help` of each program, as its own parser prints it.

Run it after a change of a command line: `python tools/generate_command_reference.py`; `--check` tests whether the
committed page is current. Invariant: programs are found, not listed: the subcommands of `nemo_rl` where they are
registered, and every `examples/run_*.py` and `examples/converters/*.py`.
"""

import argparse
import contextlib
import io
import os
import runpy
import sys
from collections.abc import Callable, Iterator

from nemo_rl import __main__ as nemo_rl_program
from nemo_rl.config.base.paths import REPOSITORY_ROOT

PAGE = REPOSITORY_ROOT / "docs" / "reference" / "commands.md"
COLUMNS = "100"
"""Width of the texts, as a terminal would give it."""

TOOLS = ("tools/check_nemo_rl_config.py", "tools/gpu_check.py")
"""Scripts of the repository that users run."""

_HEAD = """# Commands

What each program prints for `--help`, made by `python tools/generate_command_reference.py`. Below `uv run --extra cpu`
or `uv run --extra vllm`, `nemo_rl` is on the path; `python -m nemo_rl` is the same. Keys that may follow as `key=value`
are in the [configuration reference](configuration.md), exit statuses in
[several machines](../machines/cluster.md#exit-statuses).
"""


def page() -> str:
    """Return the text of the page."""
    parts = [_HEAD, "\n## nemo_rl\n", _block(_help(_nemo_rl()))]
    for command in nemo_rl_program.COMMANDS:
        parts += [f"\n### nemo_rl {command.NAME}\n", _block(_help(_nemo_rl(command.NAME)))]
    parts.append("\n## Scripts\n\nRun each with `python` in front.\n")
    for path in scripts():
        parts += [f"\n### {path}\n", _block(_help(_script(path)))]
    return "".join(parts)


def scripts() -> list[str]:
    """Return the paths of all scripts, within the repository."""
    found = [*REPOSITORY_ROOT.glob("examples/run_*.py"), *REPOSITORY_ROOT.glob("examples/converters/*.py")]
    return [*sorted(path.relative_to(REPOSITORY_ROOT).as_posix() for path in found), *TOOLS]


def _nemo_rl(*arguments: str) -> Callable[[], object]:
    return lambda: nemo_rl_program.main([*arguments, "--help"])


def _script(path: str) -> Callable[[], object]:
    def run() -> None:
        sys.argv = [path, "--help"]
        sys.path.insert(0, str((REPOSITORY_ROOT / path).parent))
        runpy.run_path(str(REPOSITORY_ROOT / path), run_name="__main__")

    return run


def _help(program: Callable[[], object]) -> str:
    """Return what a program prints before it exits with status 0.

    Raises:
        RuntimeError: the program did not exit with status 0.
    """
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), _restored():
        try:
            program()
        except SystemExit as end:
            if end.code in (0, None):
                return printed.getvalue().strip()
    raise RuntimeError(f"a program did not answer --help; it printed {printed.getvalue()[-500:]!r}")


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    """Give programs a terminal of `COLUMNS` columns, and restore what they change in this process."""
    arguments, path, columns = sys.argv, list(sys.path), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = COLUMNS
    try:
        yield
    finally:
        sys.argv, sys.path[:] = arguments, path
        del os.environ["COLUMNS"]
        if columns is not None:
            os.environ["COLUMNS"] = columns


def _block(text: str) -> str:
    paths = text.replace(f"{REPOSITORY_ROOT}/", "")
    return "\n```text\n" + "\n".join(line.rstrip() for line in paths.splitlines()) + "\n```\n"


def main() -> int:
    """Write or check the page; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is not current")
    given = parser.parse_args()
    text = page()
    if given.check:
        if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
            return 0
        print(f"{PAGE} is not current. Run python tools/generate_command_reference.py.", file=sys.stderr)
        return 1
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
