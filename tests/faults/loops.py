"""Less common training loops, for the same faults as `train.py`."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from bench.testbed.train import NAME, Ballast, Faults, Hold, Numbers, install_faults
from torch import nn
from torch.utils.data import IterableDataset, WeightedRandomSampler

import evenstep
from evenstep.train.comm.group import WorkerLostError
from evenstep.train.comm.summing import WIDER
from evenstep.train.reduce.bucket import BUCKET_BYTES

BATCH, SAMPLES = 24, 240


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), Ballast(), nn.Linear(16, 1)).double()


def accumulate(session: evenstep.Session, faults: Faults, hold: Hold) -> nn.Module:
    """Accumulate four batches per optimizer step; the scheduler is registered separately."""
    model = net()
    install_faults(faults, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    session.prepare(model, optimizer)
    session.register("schedule", scheduler)
    loader = session.loader(Numbers(SAMPLES), batch=BATCH)
    for _ in session.epochs(hold.num_epochs):
        for x, y in loader:
            faults.at("forward")
            loss = nn.functional.mse_loss(model(x), y) / 4
            faults.at("backward")
            loss.backward()
            faults.at("reduced")
            scheduler.step()
            if session.step % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
                faults.at("stepped")
    return model


def numbered(session: evenstep.Session, faults: Faults, hold: Hold) -> nn.Module:
    """Accumulate four batches per optimizer step, by their number in the epoch of ten."""
    model = net()
    install_faults(faults, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session.prepare(model, optimizer)
    loader = session.loader(Numbers(SAMPLES), batch=BATCH)
    for _ in session.epochs(hold.num_epochs):
        for i, (x, y) in session.enumerate(loader):
            faults.at("forward")
            loss = nn.functional.mse_loss(model(x), y) / 4
            faults.at("backward")
            loss.backward()
            faults.at("reduced")
            if (i + 1) % 4 == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
                faults.at("stepped")
    return model


def in_windows(session: evenstep.Session, faults: Faults, hold: Hold) -> nn.Module:
    """Accumulate in windows, counted by the script itself, with an average of the weights."""
    model = net()
    install_faults(faults, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    session.prepare(model, optimizer)
    session.register("average", average)
    loader = session.loader(Numbers(SAMPLES), batch=BATCH)
    num = 0
    for _ in session.epochs(hold.num_epochs):
        for window in session.accumulate(loader, 4):
            num += 1
            for x, y in window:
                faults.at("forward")
                loss = nn.functional.mse_loss(model(x), y) / len(window) / num
                faults.at("backward")
                loss.backward()
                faults.at("reduced")
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            faults.at("stepped")
    return nn.ModuleList([model, average])


def attempts(session: evenstep.Session, faults: Faults, hold: Hold) -> nn.Module:
    """A loop that counts by itself, as a framework's does, and leaves passes to the session."""
    model = net()
    install_faults(faults, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    session.prepare(model, optimizer, scheduler)
    loader = session.loader(Numbers(SAMPLES), batch=BATCH)

    def compute(batch: list[torch.Tensor]) -> torch.Tensor:
        x, y = batch
        faults.at("forward")
        loss = nn.functional.mse_loss(model(x), y) / (1 + num)
        faults.at("backward")
        loss.backward()
        faults.at("reduced")
        return loss.detach()

    num = 0
    for epoch in range(hold.num_epochs):
        loader.set_epoch(epoch)
        batches = iter(loader)
        for i in range(len(loader)):
            loss = session.attempt(compute, next(batches))
            if epoch == 1:
                session.sum(loss)
            num += 1
            if (i + 1) % 2 == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                faults.at("stepped")
            if epoch == 2:
                session.sum(loss)
    return model


def two_optimizers(
    session: evenstep.Session, faults: Faults, hold: Hold
) -> tuple[nn.Module, list[torch.optim.Optimizer], Callable[..., torch.Tensor]]:
    """Two nets with an optimizer each, and one backward pass for both."""
    model = nn.ModuleList([net(), net()])
    install_faults(faults, model)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(part.parameters(), lr=1e-2) for part in model
    ]
    session.prepare(model, *optimizers)

    def compute(batch: list[torch.Tensor], weight: float) -> torch.Tensor:
        x, y = batch
        faults.at("forward")
        loss = nn.functional.mse_loss(model[0](x) + model[1](x), y) * weight
        faults.at("backward")
        loss.backward()
        faults.at("reduced")
        return loss.detach()

    return model, optimizers, compute


def summed_attempts(session: evenstep.Session, faults: Faults, hold: Hold) -> nn.Module:
    """Counted attempts, with sums before and between the steps of two optimizers."""
    model, (first, second), compute = two_optimizers(session, faults, hold)
    loader = session.loader(Numbers(SAMPLES), batch=BATCH)
    num = 0
    for epoch in session.epochs(hold.num_epochs):
        for batch in loader:
            num += 1
            loss = session.attempt(lambda batch: compute(batch, 1 / num), batch)  # noqa: B023
            if epoch != 1:
                session.sum(loss)
                faults.at("summed")
            first.step()
            session.sum(loss)
            second.step()
            model.zero_grad()
            faults.at("stepped")
    return model


def summed_windows(session: evenstep.Session, faults: Faults, hold: Hold) -> nn.Module:
    """Counted windows, with sums before and between the steps of two optimizers."""
    model, (first, second), compute = two_optimizers(session, faults, hold)
    loader = session.loader(Numbers(SAMPLES), batch=BATCH)
    num = 0
    for epoch in session.epochs(hold.num_epochs):
        for window in session.accumulate(loader, 2):
            num += 1
            for batch in window:
                loss = compute(batch, 1 / num)
            if epoch != 1:
                session.sum(loss)
                faults.at("summed")
            first.step()
            session.sum(loss)
            second.step()
            model.zero_grad()
            faults.at("stepped")
    return model


def two_passes(is_summed: bool) -> Callable[..., nn.Module]:
    """A batch with a second pass, in an attempt of its own or after a sum."""

    def loop(session: evenstep.Session, faults: Faults, hold: Hold) -> nn.Module:
        model = net()
        install_faults(faults, model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        session.prepare(model, optimizer)

        def compute(batch: list[torch.Tensor]) -> None:
            nn.functional.mse_loss(model(batch[0]), batch[1]).backward()

        for batch in session.loader(Numbers(SAMPLES), batch=BATCH):
            if is_summed:
                compute(batch)
                faults.at("between")
                session.sum(1.0)
                compute(batch)
            else:
                session.attempt(compute, batch)
                faults.at("between")
                session.attempt(compute, batch)
            optimizer.step()
            optimizer.zero_grad()
        return model

    return loop


def contrastive(session: evenstep.Session, faults: Faults, hold: Hold) -> nn.Module:
    """A loss over all pairs of the batch's samples."""
    model = net()
    install_faults(faults, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session.prepare(model, optimizer)
    loader = session.loader(Numbers(SAMPLES), batch=BATCH)
    for _ in session.epochs(hold.num_epochs):
        for x, y in loader:
            optimizer.zero_grad()
            faults.at("forward")
            out = session.gather(model(x))
            faults.at("gathered")
            loss = (out - out.T).square().mean() + (out - session.gather(y)).square().mean()
            faults.at("backward")
            loss.backward()
            faults.at("reduced")
            optimizer.step()
    return model


class Columns(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A long series in 24 columns: sample `time * 24 + column` is one piece of a column."""

    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(1)
        self.x = torch.randn(BATCH, SAMPLES // BATCH, 5, 8, generator=rng, dtype=torch.float64)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time, column = divmod(index, BATCH)
        piece = self.x[column, time]
        return piece, piece.cumsum(0).tanh()


class ColumnStates:
    """The hidden state of every column, on every worker: shares change, and columns move."""

    def __init__(self, size: int) -> None:
        self.states = torch.zeros(BATCH, size, dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return {"states": self.states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.states = state["states"]


def columns(session: evenstep.Session, faults: Faults, hold: Hold) -> nn.Module:
    """Truncated backpropagation through time: each column's state goes on from step to step."""
    model = nn.ModuleList([nn.GRU(8, 8, batch_first=True), Ballast()]).double()
    install_faults(faults, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session.prepare(model, optimizer)
    hidden = ColumnStates(8)
    session.register("hidden", hidden)
    loader = session.loader(Columns(), batch=BATCH, shuffle=False)
    for _ in session.epochs(hold.num_epochs):
        for i, (x, y) in session.enumerate(loader):
            faults.at("forward")
            if i == 0:
                hidden.states = torch.zeros_like(hidden.states)
            mine = hidden.states[session.first_row :][: len(x)]
            out, last = model[0](model[1](x), mine[None])
            following = session.gather(last[0].detach())
            optimizer.zero_grad()
            faults.at("backward")
            nn.functional.mse_loss(out, y).backward()
            faults.at("reduced")
            optimizer.step()
            hidden.states = following
            faults.at("stepped")
    return model


def rollouts(session: evenstep.Session, faults: Faults, hold: Hold) -> nn.Module:
    """On-policy reinforcement learning: samples are seeds, and a batch is their episodes."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), Ballast(), nn.Linear(16, 2)).double()
    install_faults(faults, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session.prepare(model, optimizer)

    def play(seed: int) -> torch.Tensor:
        """One episode: everything random in it follows from its seed."""
        rng = torch.Generator().manual_seed(seed)
        log_probs, reward = [], 0.0
        for _ in range(4):
            place = torch.randn(8, generator=rng, dtype=torch.float64)
            probs = model(place).log_softmax(0)
            action = int(torch.multinomial(probs.exp().detach(), 1, generator=rng))
            log_probs.append(probs[action])
            reward += float(place[0] > 0) == action
        return -torch.stack(log_probs).sum() * reward

    loader = session.loader(range(SAMPLES), batch=BATCH)
    for _ in session.epochs(hold.num_epochs):
        for seeds in loader:
            faults.at("forward")
            optimizer.zero_grad()
            loss = torch.stack([play(int(seed)) for seed in seeds]).mean()
            faults.at("backward")
            loss.backward()
            faults.at("reduced")
            optimizer.step()
    return model


class Counted:
    """A counter of the script's own."""

    def __init__(self) -> None:
        self.num = 0

    def state_dict(self) -> dict[str, Any]:
        return {"num": self.num}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num = state["num"]


def plain_epochs(session: evenstep.Session, faults: Faults, hold: Hold) -> nn.Module:
    """Epochs by `range`, a schedule and a counter that go with them, and a sum."""
    model = net()
    install_faults(faults, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
    session.prepare(model, optimizer, scheduler)
    epochs = Counted()
    session.register("epochs", epochs)
    loader = session.loader(Numbers(SAMPLES), batch=BATCH)
    for _ in range(hold.num_epochs):
        for x, y in loader:
            optimizer.zero_grad()
            hold.step()
            (nn.functional.mse_loss(model(x), y) / (1 + epochs.num)).backward()
            optimizer.step()
        scheduler.step()
        epochs.num += 1
        if not session._roster.is_late and hold.is_over():  # a late worker sums its own values
            break
    return model


def looked(session: evenstep.Session, faults: Faults, hold: Hold) -> nn.Module:
    """Look at a batch, then leave each epoch after ten of its twelve batches."""
    model = net()
    install_faults(faults, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session.prepare(model, optimizer)
    loader = session.loader(Numbers(SAMPLES + 2 * BATCH), batch=BATCH)
    next(iter(loader))
    for _ in range(hold.num_epochs):
        for x, y in loader:
            optimizer.zero_grad()
            hold.step()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            if session.samples != session.step * BATCH:
                raise AssertionError(f"{session.samples} samples after {session.step} steps")
            if loader.index == 9 and not session.void:
                break
        if not session._roster.is_late and hold.is_over():  # a late worker sums its own values
            break
    return model


def dtypes(session: evenstep.Session, faults: Faults, hold: Hold) -> nn.Module:
    """Sums and gathered rows of dtypes that Gloo cannot sum, before and in a loop."""
    model = net()
    install_faults(faults, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session.prepare(model, optimizer)
    loader = session.loader(Numbers(SAMPLES), batch=BATCH)
    for _ in session.epochs(hold.num_epochs):
        for x, y in loader:
            for dtype in WIDER:
                rows = session.gather(torch.ones(len(x)).to(dtype))
                if rows.dtype != dtype or rows.float().tolist() != [1.0] * BATCH:
                    raise AssertionError(f"gathered {rows}")
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        for dtype in WIDER:
            summed = session.sum(torch.ones(2).to(dtype))
            num = 1 if dtype == torch.bool else session.world
            if summed.dtype != dtype or summed.float().tolist() != [num] * 2:
                raise AssertionError(f"the sum over {session.world} workers is {summed}")
    return model


def miscounted(session: evenstep.Session, faults: Faults, hold: Hold) -> nn.Module:
    """Accumulate by the built-in `enumerate`, and read `session.step` for other purposes."""
    model = net()
    install_faults(faults, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session.prepare(model, optimizer)
    loader = session.loader(Numbers(SAMPLES), batch=BATCH)
    for _ in session.epochs(hold.num_epochs):
        for i, (x, y) in enumerate(loader):
            loss = nn.functional.mse_loss(model(x), y) / 4
            logging.debug("step %d", session.step)
            faults.at("backward")
            loss.backward()
            if (i + 1) % 4 == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
    return model


def own_count(what: str, *, reads: bool) -> Callable[..., nn.Module]:
    """Step a scheduler, or update an average, every three batches by a count of the script's own.

    `reads`: it asks the session for its numbers, too. On a joiner the count is off by one, as it
    would be after most steps.
    """

    def loop(session: evenstep.Session, faults: Faults, hold: Hold) -> nn.Module:
        model = net()
        install_faults(faults, model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        average = torch.optim.swa_utils.AveragedModel(model)
        session.prepare(model, optimizer, scheduler)
        session.register("average", average)
        loader = session.loader(Numbers(SAMPLES), batch=BATCH)
        num = 0
        for _ in session.epochs(hold.num_epochs):
            for x, y in loader:
                if not num and session.generation > 1:
                    num = session._step.number + 1
                if reads:
                    logging.debug("step %d", session.step)
                hold.step()
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                faults.at("backward")
                loss.backward()
                optimizer.step()
                num += 1
                if num % 3 == 0 and what == "schedule":
                    scheduler.step()
                if num % 3 == 0 and what == "average":
                    average.update_parameters(model)
            if hold.is_over():
                break
        return nn.ModuleList([model, average])

    return loop


def rates(session: evenstep.Session, faults: Faults, hold: Hold) -> nn.Module:
    """Learning rates set by hand, from the session's numbers, at three places of the loop."""
    model = net()
    install_faults(faults, model)
    first, *_, last = model.children()
    optimizers = [torch.optim.SGD(part.parameters(), momentum=0.5) for part in (first, last)]
    session.prepare(model, *optimizers)
    loader = session.loader(Numbers(SAMPLES), batch=BATCH)

    def set_rate(i: int, rate: float) -> None:
        optimizers[i].param_groups[0]["lr"] = rate

    for epoch in session.epochs(hold.num_epochs):
        for i, (x, y) in session.enumerate(loader):
            set_rate(0, 0.1 / (1 + session.step))
            faults.at("forward")
            loss = nn.functional.mse_loss(model(x), y)
            faults.at("backward")
            loss.backward()
            faults.at("reduced")
            set_rate(1, 0.1 / (1 + session.samples))
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
            faults.at("stepped")
            set_rate(0, 0.1 / (2 + i + epoch))
    return model


def own_rates(session: evenstep.Session, faults: Faults, hold: Hold) -> nn.Module:
    """A learning rate by a counter of the script's own."""
    model = net()
    install_faults(faults, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    loader = session.loader(Numbers(SAMPLES), batch=BATCH)
    num = 0
    for _ in session.epochs(hold.num_epochs):
        for x, y in loader:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (1 + num)
            num += 1
            optimizer.zero_grad()
            hold.step()
            loss = nn.functional.mse_loss(model(x), y)
            faults.at("backward")
            loss.backward()
            optimizer.step()
        if hold.is_over():
            break
    return model


def broken(name: str) -> Callable[..., nn.Module]:
    """A loop whose gradients are no numbers on one worker, whatever its samples are."""

    def loop(session: evenstep.Session, faults: Faults, hold: Hold) -> nn.Module:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        loader = session.loader(Numbers(SAMPLES), batch=BATCH)
        for _ in session.epochs(hold.num_epochs):
            for x, y in loader:
                optimizer.zero_grad()
                hold.step()
                loss = nn.functional.mse_loss(model(x), y)
                if name == NAME:
                    loss = loss * torch.nan
                loss.backward()
                optimizer.step()
            if hold.is_over():
                break
        return model

    return loop


def alternate(session: evenstep.Session, faults: Faults, hold: Hold) -> nn.Module:
    """Train two nets per batch: the second on the output of the first after its step."""
    model = nn.ModuleList([net(), net()])
    install_faults(faults, model)
    first, second = (torch.optim.AdamW(part.parameters(), lr=1e-2) for part in model)
    session.prepare(model, first, second)
    loader = session.loader(Numbers(SAMPLES), batch=BATCH)
    for _ in session.epochs(hold.num_epochs):
        for x, y in loader:
            faults.at("forward")
            model.zero_grad()
            nn.functional.mse_loss(model[0](x), y).backward()
            first.step()
            faults.at("stepped")
            model.zero_grad()
            loss = nn.functional.mse_loss(model[0](x).detach() + model[1](x), y)
            faults.at("backward")
            loss.backward()
            faults.at("reduced")
            second.step()
            session.sum(loss)
    return model


def sums(session: evenstep.Session, faults: Faults, hold: Hold) -> nn.Module:
    """Call `session.sum` before the first batch, before backward and after it."""
    model = net()
    install_faults(faults, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session.prepare(model, optimizer)
    loader = session.loader(Numbers(SAMPLES), batch=BATCH)
    num = 0
    for x, _ in session.evaluation(Numbers(50), batch_size=7):
        num += len(x)
    logging.info("%d samples seen before training", int(session.sum(num)))
    for _ in session.epochs(hold.num_epochs):
        for x, y in loader:
            faults.at("forward")
            optimizer.zero_grad()
            whole = float(session.sum(float(session.counted)))
            faults.at("summed")
            loss = nn.functional.mse_loss(model(x), y) * whole / BATCH
            hold.step()
            faults.at("backward")
            loss.backward()
            faults.at("reduced")
            session.sum(loss)
            optimizer.step()
            faults.at("stepped")
        if hold.is_over():
            break
    return model


def break_early(session: evenstep.Session, faults: Faults, hold: Hold) -> nn.Module:
    """Break out of each epoch after eight of its ten batches, then evaluate."""
    model = net()
    install_faults(faults, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session.prepare(model, optimizer)
    loader = session.loader(Numbers(SAMPLES), batch=BATCH)
    for epoch in session.epochs(hold.num_epochs):
        for x, y in loader:
            if session.step == 8 * (epoch + 1):
                break
            faults.at("forward")
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            faults.at("backward")
            loss.backward()
            faults.at("reduced")
            optimizer.step()
            faults.at("stepped")
        faults.at("left")
        num = sum(len(x) for x, _ in session.evaluation(Numbers(50), batch_size=7))
        if not session.sum(num):
            raise AssertionError("a sum after the loop was voided with the loop's last batch")
    return model


def left_at_its_end(session: evenstep.Session, faults: Faults, hold: Hold) -> nn.Module:
    """Leave each epoch after its last batch without asking for its end, then evaluate.

    In the last batch of the second epoch, a held run waits for a file `gate`.
    """
    model = net()
    install_faults(faults, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session.prepare(model, optimizer)
    loader = session.loader(Numbers(SAMPLES), batch=BATCH)
    for _ in session.epochs(hold.num_epochs):
        for x, y in loader:
            is_last = loader.num_left(2) == 1
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            if session.step == 19 and hold.is_on:
                logging.info("at the gate")
                hold.wait_for("gate")
            loss.backward()
            optimizer.step()
            if is_last:
                break
        correct = session.sum(torch.ones(3, dtype=torch.float64))
        if correct.tolist() != [session.world] * 3:
            raise AssertionError(f"{correct} of {session.world} workers")
        if hold.is_over():
            break
    return model


class Shards(IterableDataset[int]):
    """Numbers of samples, shuffled in a buffer by torch's generator, as shards are.

    The worker `other` finds other samples.
    """

    def __init__(self, other: str = "") -> None:
        self.other = other

    def __iter__(self) -> Iterator[int]:
        buffer: list[int] = []
        for i in range(SAMPLES):
            buffer.append(i if self.other != NAME else -i)
            if len(buffer) > 50:
                yield buffer.pop(int(torch.randint(len(buffer), ())))
        yield from buffer


def over(dataset: Any, gate: int = -1, **options: Any) -> Callable[..., nn.Module]:
    """A loop that accumulates two batches, over data in another order.

    In the step `gate`, a held run waits for a file of that name.
    """

    def loop(session: evenstep.Session, faults: Faults, hold: Hold) -> nn.Module:
        model = net()
        install_faults(faults, model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        session.prepare(model, optimizer)
        loader = session.loader(dataset, batch=BATCH, **options)
        for _ in session.epochs(hold.num_epochs):
            for window in session.accumulate(loader, 2):
                for x, y in window:
                    faults.at("forward")
                    loss = nn.functional.mse_loss(model(x), y) / len(window)
                    hold.step()
                    if session.step == gate and hold.is_on:
                        logging.info("at the gate")
                        hold.wait_for("gate")
                    faults.at("backward")
                    loss.backward()
                    faults.at("reduced")
                optimizer.step()
                optimizer.zero_grad()
                faults.at("stepped")
            if hold.is_over():
                break
        return model

    return loop


WEIGHTS = [1.0 + i % 5 for i in range(SAMPLES)]


class SlowBackward(torch.autograd.Function):
    """In step 14, backward blocks until this worker hears of the lost one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, session: Any) -> torch.Tensor:
        ctx.session = session
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        session, until_s = ctx.session, time.monotonic() + 30.0
        while session.step == 14 and session.generation == 1 and time.monotonic() < until_s:
            if NAME == "alone" or session._roster._tracker.newest > 1:
                break
            time.sleep(0.01)
        return grads[0], None


class LogAborted(torch.autograd.Function):
    """Logs backward passes that were aborted before they got here."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if grads[0] is None:
            logging.info("backward aborted")
        return grads[0]


class SlowNet(nn.Module):
    """A net with a slow layer above an abort hook, and a layer below that logs aborted passes."""

    def __init__(self, session: evenstep.Session) -> None:
        super().__init__()
        middle = nn.Sequential(nn.Linear(16, 16), Ballast(BUCKET_BYTES))  # gets an abort hook
        self.layers = nn.ModuleList([nn.Linear(8, 16), middle, nn.Linear(16, 1)])
        self._session = [session]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.layers
        x = LogAborted.apply(torch.tanh(first(x)))  # type: ignore[no-untyped-call]
        x = SlowBackward.apply(torch.tanh(second(x)), self._session[0])  # type: ignore[no-untyped-call]
        return third(x)  # type: ignore[no-any-return]


def slow_backward(session: evenstep.Session, faults: Faults, hold: Hold) -> nn.Module:
    """A worker is lost while the others are in a long backward pass."""
    model = SlowNet(session).double()
    install_faults(faults, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session.prepare(model, optimizer)
    loader = session.loader(Numbers(SAMPLES), batch=BATCH)
    for _ in session.epochs(hold.num_epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            faults.at("backward")
            loss.backward()
            norms = [float(p.grad.norm()) for p in model.parameters() if p.grad is not None]
            if len(norms) != 7:
                raise AssertionError("a script may read its gradients, even in a void step")
            optimizer.step()
    return model


def lose_results(session: evenstep.Session, steps: set[int]) -> None:
    """In these steps only the leader learns that the gradients are reduced."""
    prepare = session.prepare

    def prepare_and_wrap(*args: Any, **options: Any) -> Any:
        prepared = prepare(*args, **options)
        reducer = session._job.model.reducer
        complete_sums = reducer._sum

        def complete_or_lose() -> None:
            complete_sums()
            if session._step.number in steps and not session.is_leader:
                steps.remove(session._step.number)
                raise WorkerLostError("pretended")

        reducer._sum = complete_or_lose  # type: ignore[method-assign]
        return prepared

    session.prepare = prepare_and_wrap  # type: ignore[method-assign]


LOOPS: dict[str, Callable[[evenstep.Session, Faults, Hold], nn.Module]] = {
    "accumulate": accumulate,
    "numbered": numbered,
    "in_windows": in_windows,
    "attempts": attempts,
    "summed_attempts": summed_attempts,
    "summed_windows": summed_windows,
    "two_attempts": two_passes(is_summed=False),
    "two_passes": two_passes(is_summed=True),
    "contrastive": contrastive,
    "columns": columns,
    "rollouts": rollouts,
    "plain_epochs": plain_epochs,
    "miscounted": miscounted,
    "own_schedule": own_count("schedule", reads=False),
    "own_average": own_count("average", reads=False),
    "own_schedule_and_steps": own_count("schedule", reads=True),
    "own_average_and_steps": own_count("average", reads=True),
    "rates": rates,
    "own_rates": own_rates,
    "broken_joiner": broken("w2"),
    "broken_worker": broken("w1"),
    "alternate": alternate,
    "sums": sums,
    "break_early": break_early,
    "left_at_its_end": left_at_its_end,
    "looked": looked,
    "dtypes": dtypes,
    "slow_backward": slow_backward,
    "in_steps": over(Numbers(100), steps=10),
    "replaced": over(Numbers(SAMPLES), replacement=True),
    "weighted": over(Numbers(SAMPLES), sampler=WeightedRandomSampler(WEIGHTS, SAMPLES)),
    "streamed": over(Shards(), transform=Numbers(SAMPLES).__getitem__),
    "stream_steps": over(Shards(), transform=Numbers(SAMPLES).__getitem__, steps=7, num_workers=2),
    "other_stream": over(Shards(other="w3"), gate=12, transform=Numbers(SAMPLES).__getitem__),
}


def main() -> None:
    """Train and save the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--loop", choices=LOOPS, required=True)
    parser.add_argument("--epochs", type=int, default=3, help="0: until `go`, only in sums")
    parser.add_argument("--lose", type=int, nargs="*", default=[], help="results of these steps")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s")
    torch.manual_seed(3)
    torch.set_num_threads(1)
    faults = Faults(args.out)
    with evenstep.join() as session:
        faults.session = session
        lose_results(session, set(args.lose))
        model = LOOPS[args.loop](session, faults, Hold(session, args.out, args.epochs))
        result = {"model": model.state_dict(), "lr": 0.0, "step": session.step}
        torch.save(result, args.out / f"{NAME}.pt")


if __name__ == "__main__":
    main()
