"""A clock that advances only when it is read or slept on."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class FakeTime:
    """Reading it takes `tick_s`; sleeps end `overshoot_s` late."""

    now_s: float = 100.0
    tick_s: float = 1e-5
    overshoot_s: float = 2e-4
    slept_s: list[float] = field(default_factory=list)

    def clock(self) -> float:
        self.now_s += self.tick_s
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept_s.append(seconds)
        self.now_s += seconds + self.overshoot_s
