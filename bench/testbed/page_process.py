"""`evenstep page` as a process."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.testbed.cli_run import ENVIRONMENT, EVENSTEP


class PageProcess:
    """The page of a run or journal, once it listens. On exit, the process is gone."""

    def __init__(self, run: Path, *options: str) -> None:
        command = [str(EVENSTEP), "page", str(run), *options]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        if not self.url:
            raise RuntimeError(f"no page: {self.process.communicate()[1]}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.terminate()
        self.process.communicate()
