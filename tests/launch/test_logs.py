"""Log lines have timestamps, and a script's own logging configuration takes precedence."""

from __future__ import annotations

import logging
import re
import sys

import pytest

from evenstep.launch.logs import show_log, show_log_by_default
from tests.launch.unconfigured import unconfigured

log = logging.getLogger("evenstep")


def say() -> None:
    log.debug("a detail")
    log.info("a fact")
    log.warning("a problem")


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def is_timed(line: str, words: str) -> bool:
    return re.fullmatch(rf"\d\d:\d\d:\d\d evenstep: {words}", line) is not None


@unconfigured()
def test_the_log_of_a_run_has_timestamps(capsys: pytest.CaptureFixture[str]) -> None:
    show_log()
    say()
    fact, problem = lines(capsys)
    assert is_timed(fact, "a fact")
    assert is_timed(problem, "a problem")


@unconfigured()
def test_a_worker_whose_script_configures_no_logging_logs_with_timestamps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_log_by_default()
    show_log_by_default()  # a second session in the same process
    say()
    fact, problem = lines(capsys)
    assert is_timed(fact, "a fact")
    assert is_timed(problem, "a problem")


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO, logging.WARNING])
@pytest.mark.parametrize("late", [False, True])
@unconfigured()
def test_a_script_that_configures_logging_gets_what_it_asked_for(
    capsys: pytest.CaptureFixture[str], level: int, late: bool
) -> None:
    if late:
        show_log_by_default()
    logging.basicConfig(level=level, format="%(levelno)d", stream=sys.stderr)
    if not late:
        show_log_by_default()
    say()
    assert list(map(int, lines(capsys))) == [n for n in (10, 20, 30) if n >= level]


@pytest.mark.parametrize("late", [False, True])
@unconfigured()
def test_a_level_that_a_script_sets_for_evenstep_applies(
    capsys: pytest.CaptureFixture[str], late: bool
) -> None:
    if late:
        show_log_by_default()
    log.setLevel(logging.INFO)
    if not late:
        show_log_by_default()
    say()
    assert len(lines(capsys)) == 2
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    say()
    assert lines(capsys) == ["a fact", "a problem"]


@unconfigured()
def test_a_handler_that_a_script_adds_to_evenstep_is_the_only_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_log_by_default()
    log.addHandler(logging.StreamHandler())
    say()
    assert lines(capsys) == ["a problem"]
