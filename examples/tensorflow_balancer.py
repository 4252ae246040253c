"""Data-parallel training in TensorFlow on uneven processes, balanced by evenstep, without torch.

Three processes train a small network together; gradients are summed over them by
`MultiWorkerMirroredStrategy`. One process is four times as slow as the others. Each computes the
mean gradient of its share, weighted by share, so the result equals that of one process. The
measured seconds travel with the gradients, so all processes know the same and compute the same
next shares.

    pip install tensorflow-cpu
    python examples/tensorflow_balancer.py
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenstep import Balancer

Vector = NDArray[np.float64]

BATCH, LEARNING_RATE = 96, 0.2
SLOWNESS = (1.0, 1.0, 4.0)  # of each process
SECONDS_PER_SAMPLE = 0.001  # of a process as fast as the first


class Net:
    """A small network, and its gradient as one vector."""

    def __init__(self) -> None:
        import tensorflow as tf  # only in processes that train: it takes seconds

        rng = np.random.default_rng(0)
        values = rng.normal(size=(8, 16)), np.zeros(16), rng.normal(size=(16, 1)) / 4
        self.params = [tf.Variable(value) for value in values]

        columns = [tf.TensorSpec([None, num], tf.float64) for num in (8, 1)]

        def weighted_gradient(x: Any, y: Any) -> Any:
            w1, b1, w2 = self.params
            share = tf.cast(tf.shape(x)[0], tf.float64) / BATCH
            with tf.GradientTape() as tape:
                errors = tf.tanh(x @ w1 + b1) @ w2 - y
                loss = share * tf.reduce_mean(tf.square(errors))
            return tf.concat([tf.reshape(g, [-1]) for g in tape.gradient(loss, self.params)], 0)

        # Traced once, for all sizes of shares.
        self.weighted_gradient = tf.function(weighted_gradient, input_signature=columns)

    def update(self, gradient: Vector) -> None:
        for param in self.params:
            size = param.shape.num_elements()
            param.assign_sub(LEARNING_RATE * gradient[:size].reshape(param.shape))
            gradient = gradient[size:]

    def flat(self) -> Vector:
        return np.concatenate([param.numpy().ravel() for param in self.params])


def samples(step: int) -> tuple[Vector, Vector]:
    """The global batch of a step, the same in every process."""
    x = np.random.default_rng((1, step)).normal(size=(BATCH, 8))
    return x, np.tanh(x.sum(1, keepdims=True))


def train(rank: int, steps: int) -> tuple[Vector, str]:
    """Train together with the other processes; returns the parameters and the last reason."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    workers = [f"process {i}" for i in range(len(SLOWNESS))]
    balancer = Balancer(BATCH, workers, min_share=1)
    net = Net()
    net.weighted_gradient(*samples(0))  # trace now: it is no part of a step's time
    for step in range(steps):
        shares = balancer.shares()
        ends = np.cumsum(list(shares.values()))
        mine = slice(ends[rank] - shares[workers[rank]], ends[rank])
        start_s = time.perf_counter()
        x, y = samples(step)
        weighted = net.weighted_gradient(x[mine], y[mine]).numpy()
        slow_s = SLOWNESS[rank] * SECONDS_PER_SAMPLE * shares[workers[rank]]
        time.sleep(max(0.0, slow_s - (time.perf_counter() - start_s)))  # the machine's speed
        seconds = np.zeros(len(workers))
        seconds[rank] = time.perf_counter() - start_s
        vector = tf.constant(np.concatenate([weighted, seconds]))
        total = strategy.reduce("SUM", vector, axis=None).numpy()
        net.update(total[: len(weighted)])
        took_s = total[len(weighted) :]
        for worker, worker_s in zip(workers, took_s, strict=True):
            balancer.report(worker, worker_s)
        if rank == 0 and (step % 5 == 0 or step == steps - 1):
            print(f"step {step:2}  {1000 * took_s.max():5.1f} ms  {shares}", flush=True)
    return net.flat(), balancer.reason


def train_alone(steps: int) -> Vector:
    """The same training in one process."""
    net = Net()
    for step in range(steps):
        net.update(net.weighted_gradient(*samples(step)).numpy())
    return net.flat()


def free_addresses(num: int) -> list[str]:
    with ExitStack() as probes:
        sockets = [probes.enter_context(socket.socket()) for _ in range(num)]
        for probe in sockets:
            probe.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{probe.getsockname()[1]}" for probe in sockets]


def main() -> None:
    """Start the processes; each of them runs this file again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    if "TF_CONFIG" not in os.environ:
        cluster = {"worker": free_addresses(len(SLOWNESS))}
        tasks = [{"type": "worker", "index": rank} for rank in range(len(SLOWNESS))]
        configs = [json.dumps({"cluster": cluster, "task": task}) for task in tasks]
        envs = [{**os.environ, "TF_CONFIG": c, "TF_CPP_MIN_LOG_LEVEL": "2"} for c in configs]
        processes = [subprocess.Popen([sys.executable, *sys.argv], env=env) for env in envs]
        sys.exit(max(process.wait() for process in processes))
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    flat, reason = train(rank, steps)
    if rank == 0:
        alone = train_alone(steps)
        error = np.abs(flat - alone).max() / np.abs(alone).max()
        print(f"relative error against one process {error:.1e}; last plan: {reason}")


if __name__ == "__main__":
    main()
