"""Every policy on every shipped scenario: the table in docs/policies.md.

python -m bench.policies
"""

from __future__ import annotations

from pathlib import Path

from bench.tables import markdown, write
from evenstep.config import Choice
from evenstep.simulate.run import compare_policies
from evenstep.simulate.scenario import load_scenario

SCENARIOS = Path(__file__).parent.parent / "scenarios"
POLICIES = ("uniform", "static", "proportional", "predictive", "curve", "shift", "auto")


def main() -> None:
    """Run all and write the table."""
    rows = []
    for path in sorted(SCENARIOS.glob("*.yaml")):
        results = compare_policies(load_scenario(path), [Choice(name) for name in POLICIES])
        achieved = [result.achieved or 0.0 for result in results[:-1]]
        others, auto = max(achieved[:-1]), achieved[-1]
        cells = [f"{100 * a:.1f}" for a in achieved]
        rows.append((path.stem, *cells, f"{100 * (auto / others - 1):+.1f} %"))
        print(*rows[-1], flush=True)
    header = ("scenario", *(f"`{name}`" for name in POLICIES), "`auto` against the best other")
    write("policies.md", "policies", markdown(header, rows))


if __name__ == "__main__":
    main()
