"""The rows of the matrix.

To add one, put a script on evenstep and its plain twin into `bench/scripts`, and a `Case` into
`CASES`. Scripts of adapters name their packages in `requires`; where those are not installed, the
row is left out by name.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.testbed.source_tree import ROOT

SCRIPTS = ROOT / "bench" / "scripts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A script, run as `python SCRIPT ARGS FILE`, and what it is compared with."""

    name: str
    what: str
    script: Path
    plain: Path
    args: tuple[str, ...] = ()
    num_steps: int = 20
    batch: int = 24
    dtype: str = "float64"  # torch's default in all of its processes
    limit: float = 1e-9  # largest relative error
    refused: Mapping[str, str] = field(default_factory=dict)  # reasons, by column
    points: tuple[str, ...] = ("forward", "backward", "bucket", "reduced")  # where to kill
    requires: tuple[str, ...] = ()  # packages
    preload: tuple[str, ...] = ()  # modules that take long to import

    @property
    def missing(self) -> list[str]:
        """Packages that are not installed here."""
        return [package for package in self.requires if find_spec(package) is None]

    @property
    def lines_changed(self) -> int:
        """Lines added, removed or replaced in the plain twin, whatever their indentation."""
        before, after = _code(self.plain), _code(self.script)
        diff = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
        return sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in diff if tag != "equal")


def _code(path: Path) -> list[str]:
    """Lines of code, without the module's docstring, blank lines and indentation."""
    text = path.read_text(encoding="utf-8")
    begin = ast.parse(text).body[0].end_lineno or 0
    return [line.strip() for line in text.splitlines()[begin:] if line.strip()]


def _pair(name: str, what: str, **more: Any) -> Case:
    """`bench/scripts/NAME.py` and its plain twin."""
    plain = SCRIPTS / f"{name}_plain.py"
    return Case(name=name, what=what, script=SCRIPTS / f"{name}.py", plain=plain, **more)


STREAM = {"verify": "streams are refused"}
# FSDP sets the gradients of shards itself: it does not call the tensor hook that "bucket" needs.
HSDP: dict[str, Any] = {
    "points": ("forward", "backward", "reduced"),
    "refused": dict.fromkeys(("alone", "torchrun", "verify"), "needs `evenstep run`"),
    "preload": ("evenstep.adapters.fsdp", "torch.distributed.fsdp"),
}
HF: dict[str, Any] = {
    "requires": ("transformers", "accelerate"),
    "preload": ("evenstep.adapters.hf", "transformers.models.gpt2.modeling_gpt2"),
}
LORA: dict[str, Any] = {
    "requires": (*HF["requires"], "peft"),
    "preload": (*HF["preload"], "peft"),
}
ACCELERATE: dict[str, Any] = {
    "requires": ("accelerate",),
    "preload": ("evenstep.adapters.accelerate",),
}
LIGHTNING: dict[str, Any] = {
    "requires": ("lightning",),
    "preload": ("evenstep.adapters.lightning",),
}

CASES: list[Case] = [
    _pair("classify", "epochs, schedule, clipping, evaluation", num_steps=22),
    _pair("nanogpt", "`get_batch`, micro-steps, learning rate by iteration"),
    _pair("resnet", "augmentation, synchronised BatchNorm, schedule by step"),
    _pair("gan", "two networks, two optimizers"),
    _pair("simclr", "a loss over all pairs of the batch"),
    _pair("stream", "IterableDataset with a shuffle buffer", refused=STREAM),
    # Sums of bfloat16 products are rounded for each worker's part of the batch by itself.
    _pair("amp", "bf16 autocast, windows of four batches", dtype="float32", limit=2e-2),
    _pair("ema", "average of the weights, windows of four batches"),
    _pair("tokens", "padded sequences, mean over tokens"),
    _pair("tbptt", "truncated backpropagation through time"),
    _pair("weighted", "sampler of its own, warm-up by a count of batches"),
    _pair("reinforce", "on-policy episodes from seeds"),
    _pair("early", "epochs left early, schedule by held-out loss", num_steps=21),
    _pair("attempt", "passes in a closure, as in frameworks"),
    _pair("hugging_face", "Trainer: windows of two batches, mean over tokens", num_steps=22, **HF),
    _pair(
        "with_lightning",
        "Lightning: schedule, windows, validation, checkpoints",
        num_steps=22,
        **LIGHTNING,
    ),
    _pair("with_accelerate", "Accelerate: windows of four batches", num_steps=22, **ACCELERATE),
    _pair(
        "with_fabric", "Fabric: schedule, windows, clipping, evaluation", num_steps=22, **LIGHTNING
    ),
    _pair("lora", "Trainer with adapters of `peft`", num_steps=22, **LORA),
    _pair("hsdp", "hosts whose two processes shard the model (FSDP2)", **HSDP),
]
