"""Every built-in forecaster, plain or gated, passes the contract for third parties."""

from __future__ import annotations

from functools import partial

from evenstep.predict import Arima, Ema, Gated, Last, Lstm, Narx, Rnn, make_forecaster
from evenstep.testing import ForecasterContract


class TestLast(ForecasterContract):
    make = Last


class TestEma(ForecasterContract):
    make = Ema


class TestArima(ForecasterContract):
    make = Arima


class TestRnn(ForecasterContract):
    make = Rnn


class TestLstm(ForecasterContract):
    make = Lstm


class TestNarx(ForecasterContract):
    make = Narx


class TestNarxWithOtherSettings(ForecasterContract):
    make = partial(Narx, delays=4, width=3, seed=7)


class TestGate(ForecasterContract):
    make = staticmethod(lambda: Gated(inner=Narx(), min_steps=1))


class TestNarxByName(ForecasterContract):
    make = partial(make_forecaster, "narx")
