"""Wheels that a test writes itself, so that no index is asked."""

import zipfile
from pathlib import Path


def make_wheel(folder: Path, name: str, source: str, version: str = "1.0", needs: str = "") -> str:
    """Write a wheel with one module; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    requires = f"Requires-Dist: {needs}\n" if needs else ""
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{name}.py", source)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return str(wheel)
