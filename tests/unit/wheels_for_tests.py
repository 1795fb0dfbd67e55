"""Write wheels for a test, so that no index is needed."""

import zipfile
from pathlib import Path


def make_wheel(folder: Path, name: str, source: str, version: str = "1.0", needs: str = "") -> str:
    """Write a wheel with one module, the same bytes each time; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    requires = f"Requires-Dist: {needs}\n" if needs else ""
    contents = {
        f"{name}.py": source,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in contents.items():
            archive.writestr(zipfile.ZipInfo(path), text)
    return str(wheel)
