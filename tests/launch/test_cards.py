"""Which card a worker of this machine sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenstep.launch.cards import Cards


def of(told: str) -> Cards:
    return Cards.of({"CUDA_VISIBLE_DEVICES": told})


def card(cards: Cards, worker: str) -> str | None:
    return cards.take(worker).get("CUDA_VISIBLE_DEVICES")


def test_each_gets_one_of_its_own_and_what_is_free_again_goes_to_the_next() -> None:
    cards = of("0, 2")
    assert [card(cards, w) for w in ("w0", "w1")] == ["0", "2"]
    cards.give_back("w0")
    assert card(cards, "w2") == "0"


def test_more_workers_than_cards_share_and_are_told_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cards = of("0,1")
    assert [card(cards, f"w{n}") for n in range(5)] == ["0", "1", "0", "1", "0"]
    assert "w4 shares card 0 with w0, w2" in caplog.text


@pytest.mark.parametrize("told", ["", "-1"])
def test_no_cards_for_anybody(told: str) -> None:
    assert of(told).take("w0") == {}  # the user's own setting stays


def test_without_a_word_all_that_are_there_by_cudas_numbers(tmp_path: Path) -> None:
    for name in ("nvidia3", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    cards = Cards.of({}, tmp_path)
    assert [card(cards, w) for w in ("w0", "w1")] == ["0", "1"]


def test_a_worker_that_outlived_its_coordinator_keeps_its_card() -> None:
    cards = of("0,1")
    cards.hold("w7", {"CUDA_VISIBLE_DEVICES": "0"})
    cards.hold("w8", {})
    assert card(cards, "w9") == "1"
