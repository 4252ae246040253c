"""What operators see of a run, and what they may ask of it."""

from __future__ import annotations

from typing import Any

import msgspec

from evenstep.coordinate.brain import Brain
from evenstep.coordinate.member import Outside, State, Terms
from evenstep.coordinate.overview import Throughput, row
from evenstep.coordinate.takeover import Takeover
from evenstep.errors import EvenstepError, InvalidInputError
from evenstep.messages import Answer, Ask
from evenstep.ports import Launcher
from evenstep.types import DrainAsked, SizeAsked, WorkerId, listed


class Operators(Takeover):
    """Answers questions from another terminal."""

    def __init__(self, terms: Terms, outside: Outside, launcher: Launcher | None) -> None:
        super().__init__(terms, outside, launcher)
        self._throughput = Throughput()

    def ask(self, now_s: float, ask: Ask) -> Answer:
        """Do what an operator asks for, and tell."""
        try:
            match ask.what:
                case "status":
                    return Answer(told=self.status(now_s))
                case "scale":
                    return Answer(told=self._scale(now_s, ask.num_workers))
                case "drain":
                    return Answer(told=self._drain(now_s, ask.worker))
                case "stop":
                    self.stop(now_s, "an operator asked for it")
                    return Answer()
        except EvenstepError as e:
            return Answer(problem=str(e))
        return Answer(problem=f"cannot do {ask.what!r}; known: status, scale, drain, stop")

    def status(self, now_s: float) -> dict[str, Any]:
        """The run as people want to see it."""
        cluster = self._brain.cluster if self._brain else None
        roster = self._running.roster if self._running else cluster.roster if cluster else ()
        number = self._running.number if self._running else self._number
        rank = {worker: i for i, worker in enumerate(roster)}
        ids = dict.fromkeys((*roster, *self._members, *sorted(self.crew.running)))
        return {
            "run": self.terms.run,
            "state": self._state(),
            "reason": self._paused or self._stopping,
            "generation": number,
            "step": self._step,
            "samples_per_s": self._throughput.samples_per_s(now_s, number),
            "restarts_left": self.crew.restarts_left,
            "settings": msgspec.to_builtins(cluster.settings) if cluster else {},
            "workers": [row(w, self._members.get(w), rank.get(w), self._state_of(w)) for w in ids],
        }

    def _scale(self, now_s: float, num_workers: int) -> dict[str, Any]:
        least, most = self.terms.least, self._most
        if not least <= num_workers <= most:
            raise InvalidInputError(
                "scale", f"this run has {least} to {most} workers, got {num_workers}"
            )
        brain = self._open_brain("scale")
        self._change(now_s, SizeAsked(num_workers=num_workers), planned=True)
        return {"num_workers": brain.cluster.target}

    def _drain(self, now_s: float, worker: WorkerId) -> dict[str, Any]:
        if self._give_up(now_s, worker, "an operator gave it up"):
            return {}
        member = self._members.get(worker)
        if member is None:
            there = listed(list(self._members)) or "none"
            raise InvalidInputError("drain", f"no worker {worker}; there are {there}")
        if member.state is State.IN:
            cluster = self._open_brain("drain").cluster
            least = cluster.settings.workers.min
            staying = sum(self._is(w, State.IN) for w in cluster.roster) - 1
            if staying < least:
                raise InvalidInputError(
                    "drain", f"{staying} of at least {least} workers would be left; stop the run"
                )
            self._change(now_s, DrainAsked(worker=worker), planned=True)
        else:
            self._let_go(member, "asked for")
        return {}

    def _open_brain(self, what: str) -> Brain:
        if self._brain is None:
            raise InvalidInputError(what, "no worker is ready yet; ask again")
        if self._stopping or self._finishing or self.ending:
            raise InvalidInputError(what, "the run is ending")
        return self._brain

    def _state(self) -> str:
        for state, holds in (
            ("ended", self.ending),
            ("stopping", self._stopping),
            ("finishing", self._finishing),
            ("waiting for workers to come back", self._away),
            ("paused", self._paused),
            ("training", self._running),
            ("regrouping", self._coming),
        ):
            if holds:
                return state
        return "starting"

    def _state_of(self, worker: WorkerId) -> str:
        if worker in self._away:
            return "away"
        member = self._members.get(worker)
        if member is None:
            return "starting" if worker in self.crew.running - self._used else "gone"
        return "stuck" if member.stuck_s is not None else member.state.value
