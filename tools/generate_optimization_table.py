"""Write the table of docs/development/optimizations.md from the list of optimizations in the code.

Run it after a change of `nemo_rl/optimizations/switch.py`: `python tools/generate_optimization_table.py`. A test checks
that the committed page is current.
"""

from pathlib import Path

from nemo_rl.optimizations.switch import OPTIMIZATIONS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "development" / "optimizations.md"
FIRST_LINE = "| name | what it does | what is slower or larger without it | written for | files |"
_PACKAGE = "nemo_rl/optimizations"


def table() -> str:
    """Return the Markdown table, one row for each optimization."""
    lines = [FIRST_LINE, "|---|---|---|---|---|"]
    for each in OPTIMIZATIONS.values():
        versions = ", ".join(f"{library} {version}" for library, version in each.written_for.items()) or "any version"
        files = ", ".join(f"`{_PACKAGE}/{module}`" for module in each.modules)
        lines.append(f"| `{each.name}` | {each.does} | {each.saves} | {versions} | {files} |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """Return the page with its table replaced by the current one.

    Args:
        page: text that holds one table with the same first line.
    """
    before, _, rest = page.partition(FIRST_LINE)
    rows = rest.split("\n\n", 1)
    return before + table() + ("\n" + rows[1] if len(rows) > 1 else "")


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
