"""Adapters are compared with one process, as runs under faults are."""

from __future__ import annotations

from tests.faults.conftest import alone

__all__ = ["alone"]
