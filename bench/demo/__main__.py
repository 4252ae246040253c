"""The product on one screen: three uneven workers train with equal shares, then with evenstep, and
one of them is slowed down, one is killed and one joins.

    make demo
    python -m bench.demo --keep runs/demo    # keep the folders of the runs

Takes about three minutes on two cores that have nothing else to do.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from bench.demo.ending import lines
from bench.demo.screen import Screen
from bench.demo.story import FULL, SHORT, play
from evenstep.errors import EvenstepError

SAME = 1e-6
"""Largest difference of parameters, as a part of what training moved them by, in double precision.
A wrong weight of a single sample makes a larger one."""


def main() -> None:
    """Play the demo, and print what came of it."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="a new folder for all files")
    parser.add_argument("--short", action="store_true", help="few, small steps, as for a test")
    parser.add_argument(
        "--no-quotas", action="store_true", help="slow workers down by sleeping, as without rights"
    )
    args = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)  # also where a shell in the background ignores them

    if args.keep is not None:
        try:
            args.keep.mkdir(parents=True)
        except OSError as e:
            parser.error(f"--keep {args.keep}: cannot be made: {e.strerror}")
    folder = (args.keep or Path(tempfile.mkdtemp(prefix="evenstep-demo-"))).resolve()
    story, screen, done = SHORT if args.short else FULL, Screen(), False
    try:
        outcome = play(story, folder, screen, quotas=not args.no_quotas)
        done = True
    except (EvenstepError, KeyboardInterrupt) as e:
        screen.clear()
        sys.exit(f"the demo ended early: {e}")
    finally:
        if args.keep is None:
            _tidy(folder, keep_report=done)
    for line in lines(story, outcome):
        screen.say(line)
    if outcome.difference > SAME:
        sys.exit(
            f"the two runs differ: by {outcome.difference:.2g} of what training moved their "
            f"parameters by, and {SAME:g} is what double precision explains"
        )


def _stop(number: int, _: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def _tidy(folder: Path, *, keep_report: bool) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif not (keep_report and path.suffix == ".html"):
            path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


if __name__ == "__main__":
    main()
