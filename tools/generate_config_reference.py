"""Write docs/reference/configuration.md from the configuration schema.

Run it after every change of `nemo_rl/config/`: `python tools/generate_config_reference.py`.
"""

import argparse
from pathlib import Path

from nemo_rl.config.paths import REPOSITORY_ROOT
from nemo_rl.config.reference import reference_markdown

DEFAULT_PAGE = REPOSITORY_ROOT / "docs" / "reference" / "configuration.md"


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=DEFAULT_PAGE, help="file to write")
    output: Path = parser.parse_args().output
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(reference_markdown(), encoding="utf-8")
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
