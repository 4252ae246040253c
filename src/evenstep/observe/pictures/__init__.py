"""The pictures of a run, as SVG: one code for the page, the report and a file for a paper.

    for picture in PICTURES:
        svg = picture.draw(history, View(begin_s=0.0, end_s=60.0, width=760))

Drawn text has no style attribute and no style sheet of its own: classes get their colours from
`stylesheet()`. A picture that is a file (`standalone=True`) carries its colours with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from evenstep.observe.history import History
from evenstep.observe.pictures.cluster_size import cluster_size
from evenstep.observe.pictures.cost import cost
from evenstep.observe.pictures.forecasts import forecasts
from evenstep.observe.pictures.labels import margin
from evenstep.observe.pictures.noise import gradient_noise
from evenstep.observe.pictures.plot import Plot, View, drawn
from evenstep.observe.pictures.roster import roster
from evenstep.observe.pictures.shares import shares
from evenstep.observe.pictures.step_time import step_time
from evenstep.observe.pictures.theme import standalone as standalone_stylesheet
from evenstep.observe.pictures.theme import stylesheet
from evenstep.observe.pictures.throughput import throughput


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One kind of picture: what it is called, what it says, and how it is made."""

    name: str
    title: str
    says: str
    lacking: str  # what is said instead, if the run has no data for it
    plot: Callable[[History, View], Plot | None]  # None: the run has no data for it

    def draw(self, history: History, view: View, *, standalone: bool = False) -> str:
        """The picture; empty if the run has no data for it in this view."""
        return draw_alike(self, [(history, view)], standalone=standalone)[0]


def draw_alike(
    picture: Picture, views: Sequence[tuple[History, View]], *, standalone: bool = False
) -> list[str]:
    """One picture of several runs; empty for runs without data for it.

    Runs have a common scale if the picture has the same unit for them.
    """
    plots = [picture.plot(history, view) for history, view in views]
    tops: dict[str, float] = {}
    for plot in plots:
        if plot is not None:
            tops[plot.unit] = max(plot.top, tops.get(plot.unit, 0.0))
    left = max((margin(history.workers) for history, _ in views), default=0.0)
    found = []
    for plot, (history, view) in zip(plots, views, strict=True):
        if plot is None:
            found.append("")
            continue
        wanted = replace(view, left=left, top=tops[plot.unit])
        if plot.top != wanted.top:
            plot = picture.plot(history, wanted) or plot
        about = picture.name, picture.title, picture.says
        found.append(drawn(plot, wanted, *about, standalone=standalone))
    return found


PICTURES: tuple[Picture, ...] = (
    Picture(
        name="throughput",
        title="Throughput",
        says="samples per second in steps, beside the limit and equal shares",
        lacking="No step was made in this time.",
        plot=throughput,
    ),
    Picture(
        name="shares",
        title="Shares",
        says="samples of each worker in a step, stacked up to the batch",
        lacking="No step was made in this time.",
        plot=shares,
    ),
    Picture(
        name="step-time",
        title="Step time by worker",
        says="each worker's time in a step: computing, then waiting for the slowest",
        lacking="No step was made in this time.",
        plot=step_time,
    ),
    Picture(
        name="roster",
        title="Roster",
        says="which workers took part, and when they joined, left or were lost",
        lacking="No worker was there in this time.",
        plot=roster,
    ),
    Picture(
        name="cluster-size",
        title="Cluster size",
        says="the number of workers, and what was decided about it",
        lacking="No worker has joined yet.",
        plot=cluster_size,
    ),
    Picture(
        name="cost",
        title="Cost",
        says="of all workers so far: by their prices or, without any, in worker-hours",
        lacking="Nothing was paid for.",
        plot=cost,
    ),
    Picture(
        name="gradient-noise",
        title="Gradient noise",
        says="the batch at which noise and signal in the gradient are equal, beside the batch",
        lacking="Not measured: the learning-rate rule `batch.lr_rule: adascale` measures it.",
        plot=gradient_noise,
    ),
    Picture(
        name="forecasts",
        title="Forecasts",
        says="each worker's speed as it was forecast, against the one that came",
        lacking="No speed was forecast in this time.",
        plot=forecasts,
    ),
)
"""In the order in which they are shown."""


def picture(name: str) -> Picture:
    """The one with a name; KeyError if there is none."""
    return {p.name: p for p in PICTURES}[name]


def whole(history: History, width: int = 760) -> View:
    """The whole run so far."""
    begin_s, end_s = history.span
    end_s = max(end_s, begin_s + 1e-3)
    return View(begin_s=begin_s, end_s=end_s, width=width, zero_s=begin_s)


__all__ = [
    "PICTURES",
    "Picture",
    "Plot",
    "View",
    "draw_alike",
    "picture",
    "standalone_stylesheet",
    "stylesheet",
    "whole",
]
