"""Tar shards as WebDataset writes them, as a stream that can begin anywhere."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from evenstep.errors import ConfigError


class TarShards:
    """Samples of tar files: consecutive files with one name up to its first dot are a sample.

    A sample is a dict of its name, "__key__", and the bytes of its files by their endings. Decode
    them in `transform`: `session.loader(TarShards(paths), batch=256, transform=decode)`. Shards are
    shuffled for each epoch unless `shuffle=False`; samples of a shard stay in order. To skip a
    sample, only its headers are read.
    """

    def __init__(self, paths: Sequence[str | Path], *, shuffle: bool = True, seed: int = 0) -> None:
        if not paths:
            raise ConfigError("paths", "there are none: give the paths of tar files")
        self._paths = sorted(map(str, paths))
        self._shuffle, self._seed = shuffle, seed

    def samples_from(self, epoch: int, begin: int) -> Iterator[dict[str, Any]]:
        """The samples of an epoch, from one on."""
        paths = self._paths
        if self._shuffle:
            order = np.random.default_rng((self._seed, epoch)).permutation(len(paths))
            paths = [paths[i] for i in order]
        num_skipped = 0
        for path in paths:
            with tarfile.open(path) as tar:
                files = (member for member in tar if member.isfile())
                for key, members in groupby(files, key=lambda member: _split(member.name)[0]):
                    if num_skipped < begin:
                        num_skipped += 1
                        continue
                    yield {"__key__": key} | {_split(m.name)[1]: _read(tar, m) for m in members}


def _split(name: str) -> tuple[str, str]:
    """A file's name up to the first dot, with its folder, and the rest."""
    path = PurePosixPath(name)
    stem, _, ending = path.name.partition(".")
    return str(path.with_name(stem)), ending


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    assert file is not None, "only regular files come here"
    return file.read()
