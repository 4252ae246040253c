"""Going on with a run after its coordinator was gone: members come back, or are given up."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from evenstep.coordinate.brain import Restored
from evenstep.coordinate.changes import Changes
from evenstep.coordinate.member import Outside, Store, Terms
from evenstep.ports import Launcher
from evenstep.types import Regroup, WorkerId


class Takeover(Changes):
    """Waits for the members that a journal tells of, then goes on with those who are there."""

    def __init__(self, terms: Terms, outside: Outside, launcher: Launcher | None) -> None:
        super().__init__(terms, outside, launcher)
        self._behind: set[WorkerId] = set()  # back, but in an older generation
        self._before: tuple[WorkerId, ...] = ()  # the roster before the newest
        self._lease_until_s = 0.0

    def restore(
        self,
        now_s: float,
        restored: Restored,
        *,
        stores: Mapping[WorkerId, Store],
        ended: Collection[WorkerId] = (),
    ) -> None:
        """Go on with a run. Its members may come back until the lease is over.

        `ended` are workers whose processes are known to be gone.
        """
        self._brain = brain = restored.brain
        self._used.update(restored.used)
        self._before = restored.before
        self._stores.update(stores)
        self._step = brain.cluster.step
        self._reconcile(now_s, "the coordinator was restarted")
        for worker in brain.cluster.roster:
            if worker in ended:
                self._missing[worker] = "it ended with the coordinator"
            elif worker not in stores:
                self._missing[worker] = "nobody knows where it is"
            else:
                self._away.add(worker)
        self._lease_until_s = now_s + self.terms.lease_s
        if not self._away:
            self._take_over(now_s)

    def adopt(self, worker: WorkerId) -> None:
        """A process outlived the coordinator that launched it. One that was to leave is going."""
        self.crew.add(worker)
        if worker in self._used and worker not in self._roster:
            self.crew.in_order.add(worker)

    def stop(self, now_s: float, why: str) -> None:
        """End the run in order: at a step's end, with a checkpoint, without those who are away."""
        for worker in sorted(self._away):
            self.crew.evict(worker)
            self._give_up(now_s, worker, "the run is ending")
        super().stop(now_s, why)

    def _give_up(self, now_s: float, worker: WorkerId, why: str) -> bool:
        """Do not wait for a member to come back."""
        if worker not in self._away:
            return False
        self._away.discard(worker)
        self._missing[worker] = why
        if not self._away:
            self._take_over(now_s)
        return True

    def _take_over(self, now_s: float) -> None:
        """All members are back, or will not come."""
        assert self._brain is not None
        cluster = self._brain.cluster
        missing, self._missing = self._missing, {}
        behind, self._behind = self._behind, set()
        if behind:  # the newest generation was announced, and has not begun
            for member in self._members.values():
                member.begun = member.id in self._before
        if missing:
            self._lose(now_s, missing)
        elif cluster.plan is None:
            if cluster.roster:
                self._pause("too few workers")
        elif behind and self._newcomers():  # they meet nobody within a step, and join later
            self._go_on(now_s, {})
        else:
            regroup = Regroup(
                generation=cluster.generation, roster=cluster.roster, reason="announced again"
            )
            newest = self._generation(regroup, cluster.plan, planned=False)
            if behind:
                self._coming = newest
                for worker in behind:
                    self._outside.send(worker, newest)
            else:
                self._running = newest
        for worker in sorted(self._brain.cluster.draining):  # asked already, and still there
            if (asked := self._members.get(worker)) is not None:
                self._let_go(asked, "asked for before the coordinator was restarted")
        self._advance(now_s)
