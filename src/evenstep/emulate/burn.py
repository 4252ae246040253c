"""The script that `interference.py` runs: burns CPU time on one core.

Arguments: the core and the parent's pid. Each line on standard input sets the fraction of the core
to use, 0 to 1. Exits when standard input closes or the parent dies. Imports nothing of evenstep, so
it starts in milliseconds.
"""

import os
import select
import sys
import time

PERIOD_S = 0.02


def burn(core: int, parent: int) -> None:
    """Use up to `duty` of each period on one core."""
    os.sched_setaffinity(0, {core})
    duty, wait_s = 0.0, None
    while os.getppid() == parent:
        if select.select([0], [], [], wait_s)[0]:
            line = os.read(0, 4096)
            if not line:
                return
            duty = float(line.split()[-1])
            os.write(1, b".")  # acknowledge
        started_s, until_s = time.monotonic(), time.process_time() + duty * PERIOD_S
        # Time lost to other processes on the core is not made up in later periods.
        while time.process_time() < until_s and time.monotonic() < started_s + PERIOD_S:
            sum(range(1000))
        # When idle, wake once a second to check that the parent is alive.
        wait_s = max(0.0, started_s + PERIOD_S - time.monotonic()) if duty > 0 else 1.0


if __name__ == "__main__":
    burn(int(sys.argv[1]), int(sys.argv[2]))
