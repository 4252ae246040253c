"""The state of the brain: one frozen value that only `decide` replaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from evenstep.config import Settings
from evenstep.decide.learning_rate import GradientNoise, global_batch
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
    roster: tuple[WorkerId, ...] = ()  # rank order is join order, so the leader rarely changes
    generation: int = 0
    step: int = -1  # last committed step
    step_generation: int = 0  # the generation that committed it
    furthest_step: int = -1  # highest step ever; up to it, steps are repeats after a rollback
    samples: int = 0  # trained on so far
    fleet: Fleet | None = None  # None while paused
    plan: Plan | None = None  # None while paused
    memory: Memory | None = None  # the policy's
    launching: int = 0  # launches in flight
    draining: frozenset[WorkerId] = frozenset()
    target: int = 0  # size last requested or decided; 0: none yet
    noise: GradientNoise = field(default_factory=GradientNoise)
    search: Search = field(default_factory=Search)
    stragglers: Stragglers = field(default_factory=Stragglers)

    @property
    def shares(self) -> dict[WorkerId, int]:
        """The shares in force."""
        return self.plan.shares if self.plan else {}

    @property
    def batch(self) -> int:
        """The global batch for the current number of workers."""
        return global_batch(self.settings.batch, max(1, len(self.workers)))

    @property
    def ranks(self) -> tuple[Worker, ...]:
        """The workers in rank order, the leader first."""
        return tuple(self.workers[w] for w in self.roster)

    def is_newer(self, event: StepDone) -> bool:
        """Whether a step is newer than the last one. A new generation may restart further back."""
        return (event.generation, event.step) > (self.step_generation, self.step)


Decision = tuple[Cluster, tuple[AnyAction, ...]]
"""The next state, and the actions to carry out."""
