"""Every example trains, as a plain script and under torchrun."""

from __future__ import annotations

import ast
import difflib
import gzip
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"

TINY = {
    "loop_plain": "--epochs 2 --limit 512",
    "loop_evenstep": "--epochs 2 --limit 512",
    "linear_regression": "--epochs 2 --limit 1024",
    "fashion_mnist": "--epochs 2 --limit 512 --batch 32",
    "cifar_resnet": "--epochs 3 --limit 160 --batch 16",
    "char_transformer": "--epochs 2 --limit 160 --batch 16",
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More threads than cores slow everything down by spinning."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run_alone(name: str, args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = EXAMPLES / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path), *args])
    monkeypatch.syspath_prepend(EXAMPLES)
    runpy.run_path(str(path), run_name="__main__")


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d{4})", output)]


@pytest.mark.parametrize("name", TINY)
def test_the_loss_falls_in_one_process(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_alone(name, TINY[name].split(), monkeypatch)
    values = losses(capsys.readouterr().out)
    assert values[-1] < values[0]


@pytest.mark.long
@pytest.mark.parametrize("name", [n for n in TINY if n != "loop_plain"])
def test_the_loss_falls_under_torchrun(name: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(EXAMPLES / f"{name}.py"), *TINY[name].split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    values = losses(done.stdout)
    assert values[-1] < values[0]


def code(name: str) -> list[str]:
    """The lines of an example without its docstring, imports and indentation."""
    text = (EXAMPLES / f"{name}.py").read_text()
    after = next(node.lineno for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
    return [line.strip() for line in text.splitlines()[after - 1 :]]


def test_four_lines_turn_the_plain_loop_into_one_on_evenstep() -> None:
    diff = list(difflib.ndiff(code("loop_plain"), code("loop_evenstep")))
    assert len([line for line in diff if line.startswith("+ ")]) == 4
    assert len([line for line in diff if line.startswith("- ")]) == 2


def write_idx(path: Path, array: np.ndarray) -> None:
    shape = np.array(array.shape, dtype=">u4").tobytes()
    head = bytes([0, 0, 8, array.ndim]) + shape
    path.write_bytes(gzip.compress(head + array.astype(np.uint8).tobytes()))


def write_fashion_mnist(folder: Path) -> None:
    for part, num in (("train", 90), ("t10k", 20)):
        labels = np.arange(num) % 10
        images = np.zeros((num, 28, 28))
        images[np.arange(num), labels] = 255
        write_idx(folder / f"{part}-images-idx3-ubyte.gz", images)
        write_idx(folder / f"{part}-labels-idx1-ubyte.gz", labels)


def write_cifar10(folder: Path) -> None:
    for name in [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]:
        rows = np.zeros((20, 1 + 3 * 32 * 32), dtype=np.uint8)
        rows[:, 0] = np.arange(20) % 10
        rows[:, 1:] = 25 * rows[:, :1]
        rows.tofile(folder / name)


@pytest.mark.parametrize(
    ("name", "write", "num"),
    [("fashion_mnist", write_fashion_mnist, 90), ("cifar_resnet", write_cifar10, 100)],
)
def test_images_are_read_from_the_given_folder(
    name: str,
    write: Callable[[Path], None],
    num: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(tmp_path)
    args = ["--data", str(tmp_path), "--epochs", "2", "--batch", "10"]
    run_alone(name, args, monkeypatch)
    out = capsys.readouterr().out
    assert f"{num} images, {tmp_path}\n" in out
    values = losses(out)
    assert values[-1] < values[0]


def test_generated_images_are_labelled_as_random(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_alone("cifar_resnet", ["--epochs", "1", "--limit", "32", "--batch", "16"], monkeypatch)
    assert "32 images, random" in capsys.readouterr().out


def test_a_text_is_read_from_the_given_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "book.txt"
    text.write_text("one line\n\nand another, longer line\n" * 30)
    run_alone("char_transformer", ["--data", str(text), "--batch", "8"], monkeypatch)
    out = capsys.readouterr().out
    assert f"60 lines, {text}\n" in out
    values = losses(out)
    assert values[-1] < values[0]
