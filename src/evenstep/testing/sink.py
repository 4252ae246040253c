"""The contract of sinks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from evenstep.ports import Sink


class SinkContract:
    """What every sink does. Subclass it as `TestMine` with `make = MySink`.

    The target is a path in a folder of the test's own.
    """

    make: ClassVar[Callable[..., Sink]]

    def opened(self, folder: Path) -> Sink:
        """A new sink; what it writes to may be there already."""
        return type(self).make(str(folder / "target"))

    def test_it_takes_all_figures_of_a_run_whose_workers_come_and_go(self, tmp_path: Path) -> None:
        sink = self.opened(tmp_path)
        for step, workers in enumerate((["w0"], ["w0", "w1"], ["w1"], [])):
            sink.write(1e9 + step, step, _some_figures(step, workers))
        sink.close()

    def test_it_takes_steps_that_repeat_and_that_go_back(self, tmp_path: Path) -> None:
        sink = self.opened(tmp_path)
        for step in (0, 7, 7, 3, 4):
            sink.write(1e9, step, _some_figures(step, ["w0"]))
        sink.close()

    def test_a_resumed_run_opens_it_again(self, tmp_path: Path) -> None:
        for first in (0, 5):
            sink = self.opened(tmp_path)
            sink.write(1e9, first, _some_figures(first, ["w0"]))
            sink.close()

    def test_it_may_be_closed_without_a_write(self, tmp_path: Path) -> None:
        self.opened(tmp_path).close()

    def test_it_is_used_in_another_thread_than_the_one_that_made_it(self, tmp_path: Path) -> None:
        sink = self.opened(tmp_path)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(sink.write, 1e9, 1, _some_figures(1, ["w0"])).result()
            pool.submit(sink.close).result()

    def test_figures_are_not_modified(self, tmp_path: Path) -> None:
        sink, figures = self.opened(tmp_path), _some_figures(1, ["w0"])
        before = dict(figures)
        sink.write(1e9, 1, MappingProxyType(figures))
        sink.close()
        assert figures == before


def _some_figures(step: int, workers: Sequence[str]) -> dict[str, float]:
    of_workers = {f"compute_s/{worker}": 0.25 for worker in workers}
    return {"step": step, "is_training": 1, "samples_per_s": 5210.5, **of_workers}
