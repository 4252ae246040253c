"""The state of the brain: one frozen value that only `decide` makes anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from evenstep.config import Settings
from evenstep.decide.learning import GradientNoise, global_batch
from evenstep.decide.scaling.search import Search
from evenstep.decide.straggler import Stragglers
from evenstep.ports import BatchPolicy, Memory, ScalingHeuristic
from evenstep.types import AnyAction, Fleet, Plan, StepDone, Worker, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Everything the brain knows."""

    settings: Settings
    policy: BatchPolicy
    heuristic: ScalingHeuristic | None = None
    workers: Mapping[WorkerId, Worker] = field(default_factory=dict)
    roster: tuple[WorkerId, ...] = ()  # in rank order: by arrival, so the leader stays while it can
    generation: int = 0
    step: int = -1  # the newest one committed
    step_generation: int = 0  # that took it
    furthest_step: int = -1  # ever seen: behind it, steps are taken again from a checkpoint
    samples: int = 0  # trained on so far
    fleet: Fleet | None = None  # None while paused
    plan: Plan | None = None  # None while paused
    memory: Memory | None = None  # the policy's
    launching: int = 0  # ordered, not yet joined
    draining: frozenset[WorkerId] = frozenset()
    target: int = 0  # the size last asked for or decided on; 0: none yet
    noise: GradientNoise = field(default_factory=GradientNoise)
    search: Search = field(default_factory=Search)
    stragglers: Stragglers = field(default_factory=Stragglers)

    @property
    def shares(self) -> dict[WorkerId, int]:
        """The shares in force."""
        return self.plan.shares if self.plan else {}

    @property
    def batch(self) -> int:
        """The global batch of the workers there are."""
        return global_batch(self.settings.batch, max(1, len(self.workers)))

    @property
    def ranks(self) -> tuple[Worker, ...]:
        """The workers in rank order, the leader first."""
        return tuple(self.workers[w] for w in self.roster)

    def is_news(self, event: StepDone) -> bool:
        """Whether a step is newer than all it knows. A later generation may begin further back."""
        return (event.generation, event.step) > (self.step_generation, self.step)


Decision = tuple[Cluster, tuple[AnyAction, ...]]
"""The next state, and the orders that lead to it."""
