"""What users import is small, typed, and costs nothing to import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import evenstep


def test_every_public_name_exists_and_is_sorted() -> None:
    assert sorted(evenstep.__all__) == evenstep.__all__
    for name in evenstep.__all__:
        assert getattr(evenstep, name).__doc__


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    assert not hasattr(evenstep, "balancr")
    assert set(evenstep.__all__) < set(dir(evenstep))


def test_importing_evenstep_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, evenstep; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_no_two_classes_have_one_name() -> None:
    homes: dict[str, list[str]] = {}
    for file in sorted(Path(evenstep.__file__).parent.rglob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(file))
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}
