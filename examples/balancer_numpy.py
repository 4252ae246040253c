"""Linear regression by synchronous SGD in plain NumPy, balanced by evenstep, without torch.

Four threads stand for four machines; two of them are slow. Each computes the mean gradient of its
share and reports how long that took. Gradients are averaged by share, so the result equals that of
one large batch for any shares.

    python examples/balancer_numpy.py
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from evenstep import Balancer

BATCH, STEPS = 256, 40
SLOWNESS = {"ann": 1.0, "bob": 1.0, "cem": 3.0, "dee": 6.0}


def gradient(worker: str, x: np.ndarray, y: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, float]:
    """Mean gradient of one share, and the seconds it took on this machine."""
    start = time.perf_counter()
    mean = x.T @ (x @ w - y) / max(1, len(y))
    time.sleep((0.002 + 0.0001 * len(y)) * SLOWNESS[worker])  # the machine's speed
    return mean, time.perf_counter() - start


def main() -> None:
    """Train, and print how the shares adapt."""
    rng = np.random.default_rng(0)
    truth = rng.normal(size=8)
    balancer = Balancer(BATCH, SLOWNESS)
    w = np.zeros(8)
    with ThreadPoolExecutor(len(SLOWNESS)) as machines:
        for step in range(STEPS):
            shares = balancer.shares()
            x = rng.normal(size=(BATCH, 8))
            y = x @ truth
            ends = np.cumsum(list(shares.values()))
            cut = {n: slice(end - b, end) for (n, b), end in zip(shares.items(), ends, strict=True)}
            work = {
                n: machines.submit(gradient, n, x[c], y[c], w) for n, c in cut.items() if shares[n]
            }
            started = time.perf_counter()
            total = np.zeros(8)
            for name, future in work.items():
                mean, seconds = future.result()
                total += (
                    mean * shares[name] / BATCH
                )  # weighted by share: the mean of the whole batch
                balancer.report(name, seconds)
            w = w - 0.3 * total
            if step % 8 == 0 or step == STEPS - 1:
                took_ms = 1000 * (time.perf_counter() - started)
                print(f"step {step:2}  {took_ms:5.1f} ms  {shares}")
    print(f"error {np.abs(w - truth).max():.1e}; last plan: {balancer.reason}")


if __name__ == "__main__":
    main()
