"""Nothing that a user runs reaches `evenstep.emulate`."""

from __future__ import annotations

from pathlib import Path

import evenstep

SOURCE = Path(evenstep.__file__).parent


def test_nothing_outside_emulate_names_it() -> None:
    """import-linter sees imports; a path or a module name in a string would slip past it."""
    outside = [p for p in SOURCE.rglob("*.py") if "emulate" not in p.relative_to(SOURCE).parts]
    assert len(outside) > 50
    assert [p for p in outside if "emulate" in p.read_text(encoding="utf-8")] == []
