"""The picture in the README: the same seconds of two real runs, equal shares and evenstep.

    python -m bench.demo --keep runs/demo
    python -m bench.picture runs/demo

Bars are steps as the journals of the demo's runs have them, before one of its workers is slowed
down. Steps that were recorded as the mean of several are drawn as that many equal ones; the last
one is cut off where the axis ends.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.demo.story import FULL
from bench.tables import DOCS
from evenstep.coordinate.run_folder import JOURNAL
from evenstep.journal import read
from evenstep.observe.pictures import standalone_stylesheet
from evenstep.observe.pictures.svg import Markup, element, join
from evenstep.types import StepDone, StepReport

OUT = DOCS / "pictures" / "uneven-run.svg"
EQUAL_STEPS = 3  # that are shown, and what evenstep does meanwhile
LEFT, TOP, ROW, WIDTH, GAP = 118.0, 44.0, 34.0, 600.0, 62.0


class Drawn(NamedTuple):
    """One step on the time axis."""

    begin_s: float
    seconds: float
    reports: Sequence[StepReport]


def steps_until(journal: Path, last_step: int) -> list[Drawn]:
    """The steps of a run's first roster, up to one of them."""
    found: list[Drawn] = []
    end_s = 0.0
    for record in read(journal)[1]:
        done = record.event
        if not isinstance(done, StepDone) or done.step > last_step or done.generation > 1:
            continue
        each_s = done.steps.seconds / done.steps.num
        for _ in range(done.steps.num):
            found.append(Drawn(end_s, each_s, done.reports))
            end_s += each_s
    return found


def panel(title: str, steps: Sequence[Drawn], seconds: float, y: float) -> Markup:
    """A row of bars for each worker: computing, then waiting for the slowest.

    A step that goes on after `seconds` is cut off there.
    """
    scale, begin_s, end_x = WIDTH / seconds, steps[0].begin_s, LEFT + WIDTH
    num_workers = len(steps[0].reports)
    parts = [element("text", title, x=LEFT, y=y - 14, font_size=15, cls="strong")]
    for i, report in enumerate(sorted(steps[-1].reports, key=lambda r: r.worker)):
        top = y + i * ROW
        label = f"{report.worker}: {report.samples:,}"
        parts.append(
            element("text", label, x=LEFT - 12, y=top + 17, font_size=13, text_anchor="end")
        )
    for step in steps:
        x = LEFT + (step.begin_s - begin_s) * scale
        whole = min(step.seconds * scale - 1.5, end_x - x)
        for i, report in enumerate(sorted(step.reports, key=lambda r: r.worker)):
            bar = {"y": y + i * ROW, "height": ROW - 9, "rx": 2}
            work = min(report.compute_s * scale, whole)
            parts += [
                element("rect", x=x, width=whole, cls="f-wait", **bar),
                element("rect", x=x, width=work, cls=f"f{i}", **bar),
            ]
    end = y + num_workers * ROW - 4
    axis = f"M{LEFT:.0f} {end:.0f}h{WIDTH:.0f}"
    parts.append(element("path", cls="line thin s-rest", d=axis))
    return join(parts)


def main() -> None:
    """Draw both runs of a demo to the same scale."""
    folder = Path(sys.argv[1])
    equal = steps_until(folder / "equal" / "run" / JOURNAL, FULL.equal - 1)[-EQUAL_STEPS:]
    seconds = sum(step.seconds for step in equal)
    even = steps_until(folder / "evenstep" / "run" / JOURNAL, FULL.slow - 1)
    end_s = even[-1].begin_s + even[-1].seconds
    first = max(i for i, step in enumerate(even) if step.begin_s <= end_s - seconds)
    until_s = even[first].begin_s + seconds
    even = [step for step in even[first:] if step.begin_s < until_s - 1e-6]
    is_cut = even[-1].begin_s + even[-1].seconds > until_s + 1e-6
    num_even = f"{len(even) - is_cut} steps" + (" and part of another" if is_cut else "")
    num_rows = len(even[0].reports)
    second = TOP + num_rows * ROW + GAP
    height = second + num_rows * ROW + 40
    cores = ", ".join(f"w{i} has {own:g}" for i, own in enumerate(FULL.cores))
    legend = f"{seconds:.1f} s of training; {cores} of a core. In colour: computing; grey: waiting"
    svg = element(
        "svg",
        element("style", Markup(standalone_stylesheet())),
        element("rect", width="100%", height="100%", cls="f-paper"),
        panel(f"Equal shares: {len(equal)} steps", equal, seconds, TOP),
        panel(f"evenstep: {num_even} in the same time", even, seconds, second),
        element("text", legend, x=LEFT, y=height - 12, font_size=12, cls="soft"),
        xmlns="http://www.w3.org/2000/svg",
        cls="es",
        width=LEFT + WIDTH + 24,
        height=height,
        role="img",
        aria_label="Steps of three uneven workers: with equal shares two wait for the slowest",
    )
    OUT.write_text(f"{svg}\n", encoding="utf-8")
    print(f"{OUT}: {len(equal)} steps with equal shares, {num_even} with evenstep")


if __name__ == "__main__":
    main()
