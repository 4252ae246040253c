"""Claims of the README and docs/ that a test can check."""

from __future__ import annotations

import ast
import json
import re
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from evenstep.launch.local import POLL_S
from evenstep.train.recover.checkpoint import Checkpoints
from evenstep.train.recover.state import TrainingState
from evenstep.types import StepReport

ROOT = Path(__file__).parents[1]
# Of adapters and examples; a page that needs one is checked where it is installed.
FRAMEWORKS = ("accelerate", "jax", "lightning", "peft", "tensorflow", "transformers", "trl")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def python_blocks(text: str) -> list[str]:
    return [textwrap.dedent(b) for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_python_on_a_page_parses_and_its_imports_work(path: Path) -> None:
    for block in python_blocks(path.read_text(encoding="utf-8")):
        for node in ast.parse(block).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                try:
                    exec(ast.unparse(node), {})
                except ImportError as e:
                    if e.name not in FRAMEWORKS and "pip install" not in str(e):
                        raise
                    pytest.skip(str(e))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_links_point_to_existing_files(path: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_journal_page_shows_a_report_with_all_of_its_fields() -> None:
    shown = re.search(r'"reports":\[(\[.*?\])', page("journal.md"))
    assert shown is not None
    assert len(json.loads(shown[1])) == len(StepReport.__struct_fields__)


def test_the_recovery_page_says_how_often_a_run_looks_for_dying_workers() -> None:
    assert f"`evenstep run` looks every {1000 * POLL_S:.0f} ms" in page("recovery.md")


def test_the_recovery_page_says_how_to_get_a_model_out_of_a_checkpoint(tmp_path: Path) -> None:
    trained, model = nn.Linear(3, 2), nn.Linear(3, 2)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(120, TrainingState({"model": trained}, {}, {}))
    checkpoints.close()
    (block,) = (b for b in python_blocks(page("recovery.md")) if "torch.load" in b)
    exec(block.replace("runs/a", str(tmp_path)), {"torch": torch, "model": model})
    assert torch.equal(model.weight, trained.weight)
