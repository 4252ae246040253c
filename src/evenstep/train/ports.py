"""The parts of a session of which there are several kinds."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from evenstep.messages import Generation
from evenstep.train.comm.group import GroupGoneError
from evenstep.train.plan.plans import RankPlan
from evenstep.train.reduce.reducer import Reducer
from evenstep.train.step import Step


class Planner(Protocol):
    """Turns measured steps into plans, locally or by the coordinator. Never blocks training."""

    def next(self, from_step: int) -> RankPlan | None:
        """The newest plan, once, valid from a step on; None on every rank but the leader."""

    def report(self, step: Step) -> None:
        """Take note of a step that was just committed."""

    def close(self, step: Step) -> None:
        """Take note of the last step, unless that was done, and stop planning."""


class NoPlanner:
    """For ranks that do not lead, which get plans in the pulse, and for plans made in advance."""

    def next(self, from_step: int) -> RankPlan | None:
        return None

    def report(self, step: Step) -> None:
        pass

    def close(self, step: Step) -> None:
        pass


class Roster(Protocol):
    """Who trains together: a fixed set of ranks, or workers that join, leave and die.

    `prepared` and `start` are called once, as soon as there is a model and a loader; `enter` before
    anything that needs the others; `settle` between two steps; `leave` and `close` at the end.
    """

    hands_over_state: bool  # joiners get their state from the others, and a void step is repeated

    @property
    def rank(self) -> int:
        """Among those that take part in a sum now."""

    @property
    def world(self) -> int:
        """The number of those that take part in a sum now."""

    def present(self, shares: tuple[int, ...]) -> tuple[int, ...]:
        """Of shares by rank of the generation, those of workers that take part in a sum now."""

    @property
    def generation(self) -> int: ...
    @property
    def current(self) -> Generation | None:
        """The coordinator's announcement of the present generation; None: there is none."""

    @property
    def is_late(self) -> bool:
        """Whether the others are ahead of this worker's loop: until its next batch it is alone."""

    @property
    def num_pending(self) -> int:
        """On the leader: by how many generations to move on after this step."""

    @property
    def is_ending(self) -> bool:
        """Whether the roster ends the script by an error, so the script did not leave its loop."""

    @property
    def left(self) -> SystemExit | None:
        """What has ended the script, if this worker left the run or was left out."""

    def prepared(self) -> None:
        """The model is there."""

    def start(self) -> Planner:
        """The loader is there: agree on the first shares."""

    def enter(self) -> None:
        """Join a generation, if this worker is in none yet, and take over its state."""

    def settle(self, *, in_loop: bool) -> int:
        """Between two steps: make every pending roster change. Returns the generation.

        `in_loop`: the loader asks, so the script's loop can follow the others into a later epoch.
        """

    def fall_behind(self) -> None:
        """This worker's loop ends: the others are in a later epoch."""

    def finish_epoch(self) -> None:
        """Wait until all workers have the epoch's last step."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over all workers; the tensor itself may be overwritten."""

    def lost(self, error: GroupGoneError) -> None:
        """The group failed in the middle of a step: make the step void, or raise."""

    def move_on(self, num: int) -> None:
        """All workers move on by so many generations at the end of this step."""

    def trained(self) -> None:
        """All epochs are over."""

    def fail(self, error: BaseException) -> None:
        """The user's script raised."""

    def leave(self) -> None:
        """Leave the run in good order."""

    def close(self) -> None:
        """Destroy the process groups."""


class Observer(Protocol):
    """Watches a session from inside and chooses its shares, as `evenstep verify` does."""

    def plans(self, batch: int, world: int) -> list[RankPlan]: ...
    def watch_data(self, dataset: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]: ...
    def watch_model(self, model: torch.nn.Module, reducer: Reducer) -> None: ...
    def begin_step(self, batch: Any, num_counted: int) -> Any: ...
    def end_step(self) -> None: ...
