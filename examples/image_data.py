"""Data for the examples, read from files or, without files, generated."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # from the package dataset-fashion-mnist


def fashion_mnist(folder: Path | None, *, train: bool, limit: int) -> tuple[TensorDataset, str]:
    """Images (1, 28, 28) from 0 to 1 with labels 0 to 9, and their origin."""
    if folder is None and not DEBIAN.is_dir():
        made = random_images(limit, (1, 28, 28), seed=1 if train else 2)
        return made, "random; Debian's package dataset-fashion-mnist has the real data"
    folder, part = folder or DEBIAN, "train" if train else "t10k"
    images = read_idx(folder / f"{part}-images-idx3-ubyte.gz")[:limit]
    labels = read_idx(folder / f"{part}-labels-idx1-ubyte.gz")[:limit]
    return _tensors(images[:, None], labels), str(folder)


def cifar10(folder: Path | None, *, train: bool, limit: int) -> tuple[TensorDataset, str]:
    """Images (3, 32, 32) from 0 to 1 with labels 0 to 9, from the binary version of CIFAR-10."""
    if folder is None:
        made = random_images(limit, (3, 32, 32), seed=1 if train else 2)
        return made, "random; give --data the folder of CIFAR-10's binary version for real data"
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] if train else ["test_batch.bin"]
    raw = np.concatenate([np.fromfile(folder / name, dtype=np.uint8) for name in names])
    rows = raw.reshape(-1, 1 + 3 * 32 * 32)[:limit]
    return _tensors(rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]), str(folder)


def read_idx(path: Path) -> np.ndarray:
    """The array in a compressed IDX file of bytes."""
    raw = gzip.decompress(path.read_bytes())
    if raw[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is not an IDX file of bytes")
    head = 4 + 4 * raw[3]
    shape = np.frombuffer(raw[4:head], dtype=">u4").tolist()
    return np.frombuffer(raw, dtype=np.uint8, offset=head).reshape(shape)


def random_images(num: int, shape: tuple[int, int, int], *, seed: int) -> TensorDataset:
    """Ten blurred patterns with noise; the patterns do not depend on the seed."""
    channels, height, width = shape
    coarse = torch.rand(10, channels, 4, 4, generator=torch.Generator().manual_seed(0))
    patterns = torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear")
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (num,), generator=rng)
    noise = torch.randn(num, *shape, generator=rng)
    return TensorDataset((patterns[labels] + 0.3 * noise).clamp(0, 1), labels)


def _tensors(images: np.ndarray, labels: np.ndarray) -> TensorDataset:
    scaled = torch.from_numpy(images.astype(np.float32)) / 255
    return TensorDataset(scaled, torch.from_numpy(labels.astype(np.int64)))
