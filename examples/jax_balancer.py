"""Data-parallel training in JAX on uneven processes, balanced by evenstep, without torch.

Three processes train a small network together; gradients are summed over them by JAX's own
collectives. One process is four times as slow as the others. Each computes the mean gradient of its
share, weighted by share, so the result equals that of one process. The measured seconds travel
with the gradients, so all processes know the same and compute the same next shares.

    pip install jax
    python examples/jax_balancer.py
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from evenstep import Balancer

Vector = NDArray[np.float64]

BATCH, PAD, LEARNING_RATE = 96, 16, 0.2
SLOWNESS = (1.0, 1.0, 4.0)  # of each process
SECONDS_PER_SAMPLE = 0.001  # of a process as fast as the first


def loss(params: dict[str, Any], x: Vector, y: Vector, weight: Vector) -> Any:
    """Weighted sum of the samples' losses; padding has weight 0."""
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return (weight * (hidden @ params["w2"] - y) ** 2).sum()


gradient = jax.jit(jax.grad(loss))


def padded_gradient(params: dict[str, Any], x: Vector, y: Vector) -> Vector:
    """Gradient of the part of the batch's mean loss that these samples have, as one vector.

    JAX compiles once for each shape, so shares are padded to a few sizes.
    """
    extra = -len(x) % PAD
    x, y = np.pad(x, ((0, extra), (0, 0))), np.pad(y, (0, extra))
    weight = np.pad(np.full(len(x) - extra, 1.0 / BATCH), (0, extra))
    return np.asarray(ravel_pytree(gradient(params, x, y, weight))[0])


def make_sum(num_workers: int) -> Callable[[Vector], Vector]:
    """A function that sums a vector over all processes."""
    mesh = Mesh(np.array(jax.devices()), ("worker",))
    rows, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["worker"], []))
    add = jax.jit(lambda matrix: matrix.sum(0), out_shardings=everywhere)

    def sum_over_workers(vector: Vector) -> Vector:
        shape = (num_workers, len(vector))
        matrix = jax.make_array_from_process_local_data(rows, vector[None], shape)
        return np.asarray(add(matrix).addressable_data(0))

    return sum_over_workers


def initial_params() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {"w1": rng.normal(size=(8, 16)), "b1": np.zeros(16), "w2": rng.normal(size=16) / 4}


def samples(step: int) -> tuple[Vector, Vector]:
    """The global batch of a step, the same in every process."""
    x = np.random.default_rng((1, step)).normal(size=(BATCH, 8))
    return x, np.tanh(x.sum(1))


def train(rank: int, steps: int) -> tuple[Vector, str]:
    """Train together with the other processes; returns the parameters and the last reason."""
    workers = [f"process {i}" for i in range(len(SLOWNESS))]
    balancer = Balancer(BATCH, workers, min_share=1)
    sum_over_workers = make_sum(len(workers))
    params = initial_params()
    flat, unflatten = ravel_pytree(params)
    for size in range(PAD, BATCH + PAD, PAD):  # compile now: it is no part of a step's time
        padded_gradient(params, *(part[:size] for part in samples(0)))
    for step in range(steps):
        shares = balancer.shares()
        ends = np.cumsum(list(shares.values()))
        mine = slice(ends[rank] - shares[workers[rank]], ends[rank])
        start_s = time.perf_counter()
        x, y = samples(step)
        weighted = padded_gradient(params, x[mine], y[mine])
        slow_s = SLOWNESS[rank] * SECONDS_PER_SAMPLE * shares[workers[rank]]
        time.sleep(max(0.0, slow_s - (time.perf_counter() - start_s)))  # the machine's speed
        seconds = np.zeros(len(workers))
        seconds[rank] = time.perf_counter() - start_s
        total = sum_over_workers(np.concatenate([weighted, seconds]))
        flat = flat - LEARNING_RATE * total[: len(flat)]
        params = unflatten(flat)
        for worker, took_s in zip(workers, total[len(flat) :], strict=True):
            balancer.report(worker, took_s)
        if rank == 0 and (step % 5 == 0 or step == steps - 1):
            print(f"step {step:2}  {1000 * total[len(flat) :].max():5.1f} ms  {shares}")
    return np.asarray(flat), balancer.reason


def train_alone(steps: int) -> Vector:
    """The same training in one process."""
    flat, unflatten = ravel_pytree(initial_params())
    for step in range(steps):
        flat = flat - LEARNING_RATE * padded_gradient(unflatten(flat), *samples(step))
    return np.asarray(flat)


def main() -> None:
    """Start the processes; each of them runs this file again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        envs = [{**os.environ, "RANK": str(r), "ADDRESS": address} for r in range(len(SLOWNESS))]
        processes = [subprocess.Popen([sys.executable, *sys.argv], env=env) for env in envs]
        sys.exit(max(process.wait() for process in processes))
    rank = int(os.environ["RANK"])
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(os.environ["ADDRESS"], len(SLOWNESS), rank)
    flat, reason = train(rank, steps)
    if rank == 0:
        alone = train_alone(steps)
        error = np.abs(flat - alone).max() / np.abs(alone).max()
        print(f"relative error against one process {error:.1e}; last plan: {reason}")


if __name__ == "__main__":
    main()
