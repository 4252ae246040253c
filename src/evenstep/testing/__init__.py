"""For authors of plug-ins: contract tests to subclass, and synthetic series with a known truth.

    class TestMine(ForecasterContract):
        make = MyForecaster

is a complete test file. It needs only NumPy and a test runner that collects classes.
"""

from evenstep.testing.forecaster import (
    ForecasterContract,
    Series,
    constant,
    forecasts,
    interference,
)
from evenstep.testing.launcher import LauncherContract
from evenstep.testing.notice import PreemptionNoticeContract
from evenstep.testing.sink import SinkContract

__all__ = [
    "ForecasterContract",
    "LauncherContract",
    "PreemptionNoticeContract",
    "Series",
    "SinkContract",
    "constant",
    "forecasts",
    "interference",
]
