"""Write `requirements/*.txt`: the resolved packages of each platform's extras, with hashes and without hosts.

They are for images, whose layers should not depend on the source or on the current content of an index:

    uv pip install --no-config --no-deps --require-hashes -r requirements/cpu.txt

Run it after every change of the requirements in pyproject.toml; `--check` tests whether the files are current, without
uv and without a network. Invariant: a file lists everything nemo_rl needs except nemo_rl itself, and hatchling to build
it.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from nemo_rl.config import REPOSITORY_ROOT
from nemo_rl.utils.venvs.build import requirements_digest

EXPORTS = {"cpu": ("cpu",), "gpu": ("vllm", "mcore")}
"""File -> extras in the file."""

_HEAD = """# Made by tools/export_requirements.py; extras: {extras}.
# The list is complete: install it with --no-config --no-deps --require-hashes.
# From the requirements {digest}
"""


def export(folder: Path, project: Path) -> None:
    """Write all files.

    Raises:
        subprocess.CalledProcessError: uv failed.
        SystemExit: the written files have errors.
    """
    folder.mkdir(exist_ok=True)
    for name, extras in EXPORTS.items():
        flags = [flag for extra in extras for flag in ("--extra", extra)]
        command = ["uv", "export", "--project", str(project.parent), "--no-default-groups", "--group", "build", *flags]
        command += ["--no-emit-project", "--no-header", "--no-annotate", "--quiet"]
        exported = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        head = _HEAD.format(extras=", ".join(extras), digest=requirements_digest(project))
        (folder / f"{name}.txt").write_text(head + exported)
    problems = list(findings(folder, project))
    if problems:
        raise SystemExit("\n".join(problems))


def findings(folder: Path, project: Path) -> Iterator[str]:
    """Yield the errors of the files, one sentence each."""
    digest = requirements_digest(project)
    for name in EXPORTS:
        path = folder / f"{name}.txt"
        if not path.exists():
            yield f"{path} is missing. Run tools/export_requirements.py."
            continue
        text = path.read_text()
        if digest not in text.partition("==")[0]:
            yield f"{path} is older than the requirements in {project.name}. Run tools/export_requirements.py."
        yield from (f"{path}: {problem}" for problem in form_problems(text))


def form_problems(text: str) -> Iterator[str]:
    """Yield lines that name a host or path, and requirements without a pinned version and hash."""
    joined = text.replace("\\\n", " ")
    for line in (line.strip() for line in joined.splitlines()):
        if not line or line.startswith("#"):
            continue
        if line.startswith("-") or " @ " in line or "://" in line:
            yield f"a host or path is named: {line}"
        elif not re.match(r"[\w.-]+(\[[\w,.-]+\])?==[\w.+!-]+(\s|$)", line):
            yield f"no version is pinned: {line}"
        elif not re.search(r"--hash=sha256:[0-9a-f]{64}(\s|$)", line):
            yield f"there is no hash: {line}"


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, list the errors")
    folder, project = REPOSITORY_ROOT / "requirements", REPOSITORY_ROOT / "pyproject.toml"
    if not parser.parse_args().check:
        export(folder, project)
    problems = list(findings(folder, project))
    print("\n".join(problems) or f"{', '.join(f'{name}.txt' for name in EXPORTS)} are current.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
