"""What `--kind` says."""

from __future__ import annotations

import pytest

from evenstep.errors import ConfigError
from evenstep.launch.kinds import ANY, parse_kind, parse_kinds
from evenstep.ports import WorkerKind


def test_a_kind_is_what_a_worker_gets() -> None:
    assert parse_kind("cpu=8") == WorkerKind(name="cpux8", cpus=8)
    assert parse_kind("cpu=8,flops=1e12").flops == 1e12
    assert parse_kind("gpu=A100:4") == WorkerKind(name="A100x4", gpus=4, gpu_type="A100")
    assert parse_kind("gpu=2,cpu=6,memory=64G,price=1.5,name=big,constraint=ib") == WorkerKind(
        name="big",
        cpus=6,
        gpus=2,
        memory_bytes=64 * 2**30,
        price=1.5,
        options={"constraint": "ib"},
    )


def test_without_kinds_the_engine_decides() -> None:
    assert parse_kinds(()) == {"": ANY}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("8", "expected cpu=N, gpu=N or gpu=TYPE:N"),
        ("cpu=many", 'cpu: expected a whole number, got "many"'),
        ("gpu=A100:x", 'gpu: expected a whole number, got "x"'),
        ("cpu=8,cpu=4", '"cpu" is given twice'),
        ("cpu=8,memory=lots", "expected a size such as 500M or 64G"),
        ("cpu=8,price=-1", 'price: expected 0 or more, got "-1"'),
        ("price=2", "names neither: give it a name=..."),
        ("cpu=8,name=a b", '"a b" is no name'),
    ],
)
def test_a_wrong_kind_names_what_is_wrong(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=r"--kind") as raised:
        parse_kind(text)
    assert told in str(raised.value)


def test_two_kinds_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two kinds are called cpux8: add name="):
        parse_kinds(["cpu=8", "cpu=8,constraint=ib"])
