"""Streams of shards: our tar shards, and those of other libraries, where they are installed."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evenstep.errors import ConfigError
from evenstep.train.data.stream import Stream
from evenstep.train.data.tar_shards import TarShards
from evenstep.train.session import Session
from tests.train.ranks import run_ranks
from tests.train.test_data import together, train

SIZES = (7, 1, 9, 3)
NUM = sum(SIZES)


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """Tar files of numbered samples, each with a text and an array."""
    paths, number = [], 0
    for shard, size in enumerate(SIZES):
        paths.append(tmp_path / f"{shard}.tar")
        with tarfile.open(paths[-1], "w") as tar:
            for _ in range(size):
                array = io.BytesIO()
                np.save(array, np.full(3, number))
                add(tar, f"part.a/{number:04}.txt", str(number).encode())
                add(tar, f"part.a/{number:04}.x.npy", array.getvalue())
                number += 1
    return paths


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def number_of(sample: dict[str, Any]) -> int:
    array = np.load(io.BytesIO(sample["x.npy"]))
    assert sample["__key__"] == f"part.a/{array[0]:04}"
    assert int(sample["txt"]) == array[0]
    return int(array[0])


def test_every_sample_of_every_shard_comes_once_from_any_position_on(shards: list[Path]) -> None:
    stream = TarShards(shards, seed=3)
    epochs = [[number_of(s) for s in stream.samples_from(epoch, 0)] for epoch in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(NUM))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    for begin in range(NUM + 1):
        assert [number_of(s) for s in stream.samples_from(1, begin)] == epochs[1][begin:]
    in_order = TarShards(shards, shuffle=False).samples_from(1, 0)
    assert [number_of(s) for s in in_order] == list(range(NUM))


def test_no_shards_are_refused() -> None:
    with pytest.raises(ConfigError, match="paths: there are none"):
        TarShards([])


def test_shards_are_shared_out_over_ranks(shards: list[Path]) -> None:
    def body(session: Session) -> list[list[int]]:
        return train(session, TarShards(shards), transform=lambda s: torch.tensor([number_of(s)]))

    used = [i for step in together(run_ranks(2, body)) for i in step]
    assert sorted(used) == list(range(NUM))


# Other libraries.


def check_stream(make: Any, number: Any) -> None:
    """Workers read alike, whenever they begin, and each epoch has every sample once."""
    first, joiner = (Stream(make(), seed=1) for _ in range(2))
    epochs = [list(map(number, first.items(epoch, 0, 2 * NUM))) for epoch in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(NUM))] * 2
    assert list(map(number, joiner.items(1, 7, NUM))) == epochs[1][7:]
    assert joiner.digest(1, 8, 12) == first.digest(1, 8, 12) != 0


def test_a_dataset_of_hugging_face_in_streaming_mode(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    files = [tmp_path / f"{i}.jsonl" for i in range(4)]
    for i, file in enumerate(files):
        file.write_text("".join(f'{{"number": {number}}}\n' for number in range(i, NUM, 4)))

    def make() -> Any:
        stream = datasets.load_dataset(
            "json", data_files=[str(file) for file in files], split="train", streaming=True
        )
        return stream.shuffle(seed=5, buffer_size=6)

    check_stream(make, lambda sample: sample["number"])
    first = Stream(make(), seed=1)
    assert first.items(0, 0, NUM) != first.items(1, 0, NUM)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # the library's
def test_a_web_dataset(shards: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    wds = pytest.importorskip("webdataset")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")  # as under torchrun
    paths = [str(path) for path in shards]

    def stream(epoch: int) -> Any:
        whole = wds.WebDataset(paths, nodesplitter=lambda urls: urls, shardshuffle=False)
        return whole.compose(wds.detshuffle(6, epoch=epoch))

    check_stream(lambda: stream, number_of)
