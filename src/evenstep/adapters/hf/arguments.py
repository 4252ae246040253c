"""Training arguments: hide torchrun from Accelerate, and refuse what is not supported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import transformers
from accelerate.utils import DistributedType

from evenstep.adapters.single_process import without_torchrun
from evenstep.errors import ConfigError

# Arguments, the only values of them that work, and what to do instead.
ARGUMENTS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("deepspeed", (None, ""), "evenstep reduces the gradients itself; leave it out"),
    ("fsdp", (None, "", False, []), "every worker has the whole model; leave it out"),
    ("parallelism_config", (None,), "every worker has the whole model; leave it out"),
    ("fp16", (False,), "its loss scale belongs to Accelerate; use bf16=True"),
    ("torch_compile", (False, None), "it has not been tried with evenstep; leave it out"),
    ("auto_find_batch_size", (False,), "give a batch size that fits, or a cap: join={'cap': 16}"),
    ("ignore_data_skip", (False,), "a run always continues where it was; leave it out"),
    (
        "include_num_input_tokens_seen",
        ("no", False),
        "the count of a worker that is lost would be missing; leave it out",
    ),
    ("dataloader_in_order", (True,), "all workers train on the samples of the same step"),
    ("enable_jit_checkpoint", (False,), "SIGTERM is evenstep's notice that a worker leaves"),
    (
        "train_sampling_strategy",
        ("random", "sequential"),
        "evenstep cuts each batch by the workers' speeds; use 'random' or 'sequential'",
    ),
)


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """Those of transformers, which torchrun may start as well as `evenstep run`.

    Under torchrun, transformers' own make a process group for DDP.
    """

    def __post_init__(self) -> None:
        with without_torchrun():
            super().__post_init__()


def check_arguments(args: Any, distributed: DistributedType) -> None:
    """Raise for arguments that would train differently, or not at all."""
    if distributed != DistributedType.NO:
        raise ConfigError(
            "TrainingArguments",
            f"have set up {distributed.value} by themselves. Import both from evenstep: "
            "from evenstep.adapters.hf import Trainer, TrainingArguments",
        )
    if args.n_gpu > 1:
        raise ConfigError(
            "TrainingArguments",
            f"this process sees {args.n_gpu} GPUs; start a worker for each, with one visible "
            "(CUDA_VISIBLE_DEVICES), as evenstep run does",
        )
    for name, allowed, way_out in ARGUMENTS:
        value = getattr(args, name, allowed[0])
        value = getattr(value, "value", value)  # of an enum
        if value not in allowed:
            raise ConfigError(name, f"{value!r} is not supported: {way_out}")
    if "layerwise" in str(args.optim) or "lomo" in str(args.optim):
        raise ConfigError("optim", f"{args.optim} steps during backward, before gradients are mean")
