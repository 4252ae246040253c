"""Who holds the others up, and for how long that is borne."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median

from evenstep.coordinate.member import Outside, State, Terms
from evenstep.coordinate.operators import Operators
from evenstep.coordinate.watch import PATIENCE_STEPS, deadlocked, overdue
from evenstep.messages import Generation, Goodbye
from evenstep.ports import Launcher
from evenstep.types import WorkerId

MEETINGS = 3  # of a roster that cannot take a step, or with a newcomer, before someone goes
SAVING_S = 600.0  # for whoever writes the last checkpoint
RECENT_STEPS = 20  # whose median tells how long a step takes
OWN_LAG_S = 2.0  # after which it was us who did not listen


class Patience(Operators):
    """Looks at the clock, and evicts those for whom the others would wait in vain."""

    def __init__(self, terms: Terms, outside: Outside, launcher: Launcher | None) -> None:
        super().__init__(terms, outside, launcher)
        self._seen_s: float | None = None  # when we last looked at the clock
        self._steps_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._num_meetings = 0  # since the last step, of workers that all waited

    def _look_at_the_clock(self, now_s: float) -> None:
        """If it was us who stood still, nobody else was silent."""
        if self._seen_s is not None and now_s - self._seen_s > OWN_LAG_S:
            for member in self._members.values():
                member.forgive(now_s, now_s - self._seen_s)
            self._stopping_s += now_s - self._seen_s
        self._seen_s = now_s

    def _watch(self, now_s: float) -> None:
        patience_s, silent_s = self._patience_s(), self.terms.silent_s
        limit_s = silent_s + patience_s
        if self._stopping:
            self._urge(now_s, limit_s)
        there = [m for m in self._members.values() if m.state is not State.DONE]
        if self._finishing or self._parting:
            # The others may be gone, and not complain.
            late = [m for m in there if m.trains and now_s - m.heard_s > limit_s]
            self._evict(now_s, {m.id: "silent while the others end" for m in late})
        elif (generation := self._watched()) is not None:
            roster = [m for m in there if m.id in generation.roster]
            blamed = overdue(
                roster,
                now_s,
                silent_s=silent_s,
                patience_s=patience_s,
                lease_s=self.terms.lease_s,
            )
            all_there = len(roster) == len(generation.roster)
            if not blamed and all_there and deadlocked(roster, now_s, patience_s):
                self._resolve(now_s, generation)
            self._evict(now_s, blamed)

    def _urge(self, now_s: float, limit_s: float) -> None:
        """A stop does not wait without end for who is stuck in the script, though heard of."""
        waited_s = now_s - self._stopping_s
        if waited_s > limit_s and not self._parting:
            self._part(now_s)  # whatever change is under way: it does not come about
        elif waited_s > limit_s:
            self._hurry()
            if waited_s > 2 * limit_s:
                saver = self._coming.saves if self._coming and waited_s < SAVING_S else ""
                stays = [m.id for m in self._members.values() if m.trains and m.id != saver]
                self._evict(now_s, dict.fromkeys(stays, "it does not leave"))

    def _resolve(self, now_s: float, generation: Generation) -> None:
        """All wait for each other: they meet anew. If that does not help, with one less.

        The others get on without a newcomer, so how often it was in the way is counted for itself.
        """
        newcomers = self._newcomers() if generation is self._coming else []
        for member in newcomers:
            member.num_unmet += 1
        apart = [m.id for m in newcomers if m.num_unmet >= MEETINGS]
        self._num_meetings += 1
        if not apart and self._num_meetings > MEETINGS:
            self._num_meetings, apart = 0, [generation.roster[-1]]
        if apart:
            self._evict(now_s, dict.fromkeys(apart, "the others and it cannot meet"))
        else:
            self._meet_anew(now_s, "all wait for each other")

    def _evict(self, now_s: float, blamed: Mapping[WorkerId, str]) -> None:
        for worker, why in blamed.items():
            self._outside.send(worker, Goodbye(why=why))
            self._outside.hang_up(worker)
            self.crew.evict(worker)
        if blamed:
            self._lose(now_s, blamed)

    def _watched(self) -> Generation | None:
        """The generation that the workers are in, or on their way into."""
        coming, running = self._coming, self._running
        if running is None or coming is None:
            return running or coming
        there = [self._members[w] for w in running.roster if w in self._members]
        return coming if any(m.generation == coming.number for m in there) else running

    def _unblock(self, now_s: float) -> None:
        """Someone is stuck. Those who are known to be gone are not waited for any longer."""
        if self._leaver_gone_s is not None:
            self._force()
        elif self._finishing:
            self._go_on(now_s, {})
        elif self._parting and any(not self._trains(w) for w in self._roster):
            self._hurry()
        else:
            self._watch(now_s)

    def _patience_s(self) -> float:
        return max(self.terms.patience_s, PATIENCE_STEPS * median(self._steps_s or [0.0]))
