"""The contract of preemption notices."""

from __future__ import annotations

from evenstep.ports import PreemptionNotice


class PreemptionNoticeContract:
    """What every preemption notice guarantees. Subclass it as `TestMine`.

    `staying` and `going` make a notice on a machine that stays, and on one that is taken away.
    """

    def staying(self) -> PreemptionNotice:
        raise NotImplementedError

    def going(self) -> PreemptionNotice:
        raise NotImplementedError

    def test_a_machine_that_stays_gives_no_reason(self) -> None:
        notice = self.staying()
        assert [notice.poll() for _ in range(3)] == ["", "", ""]

    def test_a_machine_that_goes_gives_a_reason_of_one_printable_line(self) -> None:
        why = self.going().poll()
        assert why
        assert why.isprintable()

    def test_the_reason_is_given_again_if_asked_again(self) -> None:
        notice = self.going()
        first = notice.poll()
        assert notice.poll() == first
