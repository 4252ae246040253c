"""Run as a script by `interference.py`: takes its part of one core until told otherwise.

Arguments: the core, the parent's pid, the period in seconds. Each line on standard input is the
part of the core to take from now on, 0 to 1. Ends when that input ends or the parent is gone.
Imports nothing of evenstep, so that it starts in milliseconds.
"""

import os
import select
import sys
import time


def main(core: int, parent: int, period_s: float) -> None:
    """Take CPU time, up to `duty` of each period, on one core."""
    os.sched_setaffinity(0, {core})
    duty, wait_s = 0.0, None
    while os.getppid() == parent:
        if select.select([0], [], [], wait_s)[0]:
            line = os.read(0, 4096)
            if not line:
                return
            duty = float(line.split()[-1])
            os.write(1, b".")  # heard
        begun_s, until_s = time.monotonic(), time.process_time() + duty * period_s
        # What the core's other users leave of the period, at most: it does not catch up later.
        while time.process_time() < until_s and time.monotonic() < begun_s + period_s:
            sum(range(1000))
        # Idle, it still wakes now and then to see that the parent lives.
        wait_s = max(0.0, begun_s + period_s - time.monotonic()) if duty > 0 else 1.0


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
