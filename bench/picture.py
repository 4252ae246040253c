"""The picture in the README: one step of `scenarios/four-uneven.yaml`, equal shares and `auto`.

python -m bench.picture
"""

from __future__ import annotations

from pathlib import Path

from bench.tables import DOCS
from evenstep.config import Choice
from evenstep.journal import read
from evenstep.simulate.run import run
from evenstep.simulate.scenario import load_scenario
from evenstep.types import StepDone, StepReport

SCENARIO = Path(__file__).parent.parent / "scenarios" / "four-uneven.yaml"
LEFT, TOP, ROW, WIDTH = 96, 44, 30, 560
COLORS = {"work": "#2f6f4f", "wait": "#d9d4c7", "text": "#3b3a36", "line": "#b23a2e"}


def last_step(policy: str, path: Path) -> tuple[float, list[StepReport]]:
    """Step time and reports of a policy's last step."""
    path.unlink(missing_ok=True)
    run(load_scenario(SCENARIO, ["steps=30"]), Choice(policy), journal=path)
    _, records = read(path)
    steps = [r.event for r in records if isinstance(r.event, StepDone)]
    path.unlink()
    return steps[-1].seconds, list(steps[-1].reports)


def panel(title: str, seconds: float, reports: list[StepReport], y: int, scale: float) -> list[str]:
    """One step as bars: compute, then waiting for the slowest worker."""
    font = f'font-family="sans-serif" fill="{COLORS["text"]}"'
    compute_s = max(r.compute_s for r in reports)
    heading = f"{title}: {1000 * seconds:.0f} ms a step"
    parts = [
        f'<text x="{LEFT}" y="{y - 12}" font-size="15" font-weight="600" {font}>{heading}</text>'
    ]
    for i, r in enumerate(reports):
        top, work, wait = y + i * ROW, r.compute_s * scale, (compute_s - r.compute_s) * scale
        bar = f'y="{top}" height="{ROW - 8}"'
        parts += [
            f'<text x="{LEFT - 10}" y="{top + 16}" font-size="13" text-anchor="end" {font}>'
            f"{r.worker.rsplit('-', 1)[0]}</text>",
            f'<rect x="{LEFT}" width="{work:.1f}" {bar} rx="2" fill="{COLORS["work"]}"/>',
            f'<rect x="{LEFT + work:.1f}" width="{wait:.1f}" {bar} fill="{COLORS["wait"]}"/>',
            f'<text x="{LEFT + 8}" y="{top + 16}" font-size="12" font-family="sans-serif" '
            f'fill="#ffffff">{r.samples}</text>',
        ]
    end, bottom = LEFT + compute_s * scale, y + len(reports) * ROW - 4
    parts.append(
        f'<line x1="{end:.1f}" x2="{end:.1f}" y1="{y - 4}" y2="{bottom}" '
        f'stroke="{COLORS["line"]}" stroke-width="2"/>'
    )
    return parts


def main() -> None:
    """Run both policies and draw them to the same scale."""
    journal = DOCS / "picture.jsonl"
    equal_s, equal = last_step("uniform", journal)
    auto_s, auto = last_step("auto", journal)
    scale = WIDTH / max(r.compute_s for r in equal)
    second = TOP + len(equal) * ROW + 48
    height = second + len(auto) * ROW + 34
    legend = (
        f'<text x="{LEFT}" y="{height - 10}" font-size="12" font-family="sans-serif" '
        f'fill="{COLORS["text"]}">dark: computing so many of 128 samples; '
        "light: waiting for the slowest</text>"
    )
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 24}" height="{height}">',
        '<rect width="100%" height="100%" fill="#fbfaf7"/>',
        *panel("equal shares", equal_s, equal, TOP, scale),
        *panel("auto", auto_s, auto, second, scale),
        legend,
        "</svg>",
    ]
    (DOCS / "four-uneven.svg").write_text("\n".join(svg) + "\n", encoding="utf-8")
    print(f"equal {1000 * equal_s:.1f} ms, auto {1000 * auto_s:.1f} ms")


if __name__ == "__main__":
    main()
