"""What the demo ends with, as lines of text."""

from __future__ import annotations

from collections.abc import Sequence

from bench.demo.story import Outcome, Story, seconds

BUSY = 0.05
"""A spread of the machine's speed beyond which parts of the limit mean little."""

EVENTS = ("evenstep", "w2 slowed down", "w0 killed", "w3 joined")


def lines(story: Story, outcome: Outcome) -> list[str]:
    """A row for each phase, then what the demo set out to show."""
    equal, loss, join = outcome.equal, outcome.phases[2], outcome.phases[3]
    rows = [
        ("", "cores", "shares", "a step", "the limit", "reached"),
        ("equal shares", _spaced(story.cores), _spaced(equal.shares), f"{outcome.equal_s:.3f} s"),
    ]
    table = zip(EVENTS, story.clusters, outcome.phases, outcome.limits, outcome.parts, strict=True)
    for name, cores, phase, limit, part in table:
        times = f"{phase.settled_s:.3f} s", f"{seconds(limit):.3f} s", f"{part:.0%}"
        rows.append((name, _spaced(cores), _spaced(phase.shares), *times))
    many, one = outcome.losses
    facts = [
        ("speed-up", f"{outcome.speedup:.2f}x over equal shares"),
        (
            "of the limit",
            f"{outcome.settled_part:.0%} once shares have settled, "
            f"{outcome.whole_part:.0%} with all steps and changes",
        ),
        ("idle", f"{loss.idle_s:.2f} s for the loss, {join.idle_s:.2f} s for the join"),
        (
            "the same run",
            f"after {outcome.num_steps} steps loss {many:.9f}, in one process {one:.9f};",
        ),
        ("", f"parameters differ by {outcome.difference:.1g} of what training moved them by"),
        ("report", str(outcome.report)),
    ]
    found = [*map(_row, rows), "", *(f"{name:<15}{text}" for name, text in facts)]
    if outcome.spread > BUSY:
        busy = f"its speed differed by {outcome.spread:.0%} between the turns of the limit"
        found += ["", f"This machine is busy ({busy}): repeat the demo when it is idle."]
    return found


def _row(cells: Sequence[str]) -> str:
    name, cores, shares, *times = cells
    return f"{name:<15}{cores:<15}{shares:<16}{''.join(f'{text:>11}' for text in times)}".rstrip()


def _spaced(values: Sequence[float]) -> str:
    return " ".join(f"{value:g}" for value in values)
