"""The packages in examples/, installed as pip would do it."""

from __future__ import annotations

import os
import shutil
import tomllib
from pathlib import Path


def install(example: Path, folder: Path) -> dict[str, str]:
    """Put a package with its entry points into a folder; returns an environment that has it."""
    described = tomllib.loads((example / "pyproject.toml").read_text())
    project = described["project"]
    for module in described["tool"]["setuptools"]["py-modules"]:
        shutil.copy(example / f"{module}.py", folder)
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, names in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {where}" for name, where in names.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return {**os.environ, "PYTHONPATH": str(folder)}
