"""Fabric as a worker of a run: an ordinary Fabric loop, with batches and gradients of all workers.

Fabric leaves the loop to the script. So a batch that is repeated after the loss of a worker is one
more iteration; loops that count iterations take their number from `FabricStrategy.enumerate`, and
those that count by themselves are refused.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from lightning.fabric.plugins.precision import MixedPrecision
from lightning.fabric.strategies import SingleDeviceStrategy
from lightning.fabric.utilities.rank_zero import rank_zero_only

from evenstep.adapters.gathering import from_bytes, gather, ordered_batches, to_bytes
from evenstep.adapters.lightning.batches import make_loader
from evenstep.adapters.lightning.device import own_device
from evenstep.adapters.lightning.fabric_batches import FabricBatches, NumberedBatches
from evenstep.adapters.lightning.schedulers import schedulers_of
from evenstep.adapters.shared_evaluation import SharedEvaluation
from evenstep.errors import ConfigError, EvenstepError
from evenstep.train.data.loader import Loader
from evenstep.train.join import join
from evenstep.train.session import Session

GATHERS = "fabric.strategy.gather_for_metrics"
WAY_OUT = (
    "Count with `for i, batch in fabric.strategy.enumerate(loader)`, in which a repeated batch "
    "keeps its number."
)


class FabricStrategy(SingleDeviceStrategy):
    """For `Fabric(strategy=evenstep.adapters.lightning.FabricStrategy())`.

    `device` is this worker's, by default its first card if it has one. `weight` and
    `sync_batchnorm` are those of `session.loader` and `session.prepare`; further arguments are
    those of `evenstep.join`, such as `cap=16`.
    """

    def __init__(
        self,
        device: Any = None,
        *,
        weight: Callable[[Any], float] | None = None,
        sync_batchnorm: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(device=own_device() if device is None else device)
        self._weight, self._sync_batchnorm, self._join_options = weight, sync_batchnorm, options
        self._session: Session | None = None
        self._models: list[torch.nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._batches: FabricBatches | None = None  # that are trained on
        self._loader: Loader | None = None
        self._evaluation: SharedEvaluation | None = None  # in whose loop the script is
        self._evaluated_whole = False  # a DataLoader since the last batch of training
        self._in_batch = False
        self._left_early: str = ""  # why a loop may have been left at the wrong batch

    @property
    def session(self) -> Session:
        """This worker's part in the run, from `fabric.launch()` on."""
        if self._session is None:
            raise ConfigError("fabric", "call fabric.launch() first, before fabric.setup(...)")
        return self._session

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker writes; known from the first batch on, before it is False."""
        return self.global_rank == 0

    # Before the first batch.

    def setup_environment(self) -> None:
        super().setup_environment()
        if self._session is not None:
            return
        precision = self.precision
        if isinstance(precision, MixedPrecision) and precision.scaler is not None:
            raise ConfigError("precision", "'16-mixed' is not supported: use 'bf16-mixed'")
        self._session = join(**self._join_options)
        self._session.framework.count_with(WAY_OUT)
        self._show_rank()
        self._close_at_exit()

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """A model with nothing to train is left alone."""
        self._check_setup("model")
        if any(param.requires_grad for param in module.parameters()):
            self._models.append(module)
        return module

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        self._check_setup("optimizer")
        self._optimizers.append(optimizer)
        return optimizer

    def _check_setup(self, what: str) -> None:
        _ = self.session  # is there
        if self._batches is not None:
            raise ConfigError(
                "fabric.setup", f"was given a {what} after the first batch: set up all before it"
            )

    def process_dataloader(self, dataloader: Any) -> FabricBatches:
        _ = self.session  # is there
        return FabricBatches(dataloader, self)

    def _begin(self, batches: FabricBatches) -> Loader:
        """The session's loader for the batches that are trained on."""
        if self._loader is not None:
            if batches is not self._batches:
                raise ConfigError(
                    "setup_dataloaders",
                    "a second DataLoader is looped over with gradients and a model in training "
                    "mode, and a run has one to train on. To evaluate, call model.eval() before "
                    "the loop",
                )
            return self._loader
        session = self.session
        if not self._models:
            raise ConfigError(
                "fabric.setup", "was given no model that can be trained: call it before the loop"
            )
        model = self._models[0] if len(self._models) == 1 else torch.nn.ModuleList(self._models)
        optimizers = self._optimizers
        others = [*optimizers, *schedulers_of(optimizers)]
        session.prepare(model, *others, sync_batchnorm=self._sync_batchnorm)
        self._loader = make_loader(session, batches.plain, self._weight)
        self._batches = batches
        if batches.loaded is not None:
            self._loader.load_state_dict(batches.loaded)
        return self._loader

    # The loop.

    def epochs(self, num: int, loader: Any) -> Iterator[int]:
        """Epoch numbers from where the run is: `for epoch in fabric.strategy.epochs(90, loader)`.

        With `range(90)`, a worker that joins runs through the epochs that are over first.
        """
        self._begin(getattr(loader, "_dataloader", loader))
        return self.session.epochs(num)

    def enumerate(self, loader: Any, start: int = 0) -> Iterator[tuple[int, Any]]:
        """Batches of the training loader, with numbers that a repeated batch keeps."""
        own = self._begin(getattr(loader, "_dataloader", loader))
        numbered: Any = NumberedBatches(loader, own)
        return self.session.enumerate(numbered, start)

    @property
    def trains(self) -> bool:
        """Whether a loop that begins now trains; else it evaluates."""
        return torch.is_grad_enabled() and any(model.training for model in self._models)

    def train_on(self, batches: FabricBatches) -> Iterator[Any]:
        """One epoch of this worker's share of the batches."""
        self._check_left_early()
        loader, session = self._begin(batches), self.session
        num_taken = num_repeated = 0
        try:
            for batch in loader:
                self._show_rank()
                self._in_batch, self._evaluated_whole = True, False
                num_taken += 1
                yield batch
                num_repeated += session.void
        except GeneratorExit:
            num_repeated += session.void
            if num_repeated and not session.framework.counts_are_right:
                self._left_early = (
                    f"a loop was left after {num_taken} iterations, of which {num_repeated} had to "
                    "be repeated because a worker was lost. If it counts iterations to know when, "
                    f"it has trained too few batches. {WAY_OUT}"
                )
            raise
        finally:
            self._in_batch = False
        self._show_rank()

    def backward(self, tensor: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        if not self._in_batch:
            raise ConfigError(
                "fabric.backward",
                "was called outside of a loop over a DataLoader of fabric.setup_dataloaders that "
                "trains: set up the DataLoader, and call model.train() before the loop",
            )
        super().backward(tensor, module, *args, **kwargs)

    def _check_left_early(self) -> None:
        if self._left_early:
            raise EvenstepError(self._left_early)

    def _show_rank(self) -> None:
        session = self.session
        rank = session.rank if session.generation else 1  # nobody writes before ranks are known
        self.global_rank = self.local_rank = rank_zero_only.rank = rank
        self.world_size = max(session.world, rank + 1)

    def evaluate(self, loader: Any) -> Iterator[Any]:
        """This worker's share of each batch; `gather_for_metrics` is to be called for each.

        Without it, every worker evaluates all of a DataLoader.
        """
        batches = getattr(loader, "_dataloader", loader)
        sampler = ordered_batches(batches.plain, "evaluate", "give shuffle=False, and no sampler")
        self._sums_for("strategy.evaluate")  # all workers are there
        shared = SharedEvaluation(self.session, sampler, batches.plain, GATHERS)
        try:
            for batch in shared:
                self._evaluation = shared
                self._show_rank()
                yield self.batch_to_device(batch)
        finally:
            self._evaluation = None
        self._show_rank()

    def gather_for_metrics(self, tree: Any) -> Any:
        """The rows of all workers for a batch of `evaluate`, in the order of the DataLoader."""
        if self._evaluation is None:
            raise ConfigError(
                GATHERS,
                "was called outside of `for batch in fabric.strategy.evaluate(loader)`: call it "
                "there, for every batch",
            )
        return self._evaluation.gather(GATHERS, tree)

    def evaluate_whole(self, batches: FabricBatches) -> Iterator[Any]:
        """All of a DataLoader on this worker, as on every other."""
        self._evaluated_whole = True
        yield from batches.plain

    def position(self, batches: FabricBatches) -> dict[str, Any]:
        """Where training is in these batches; empty if they are not trained on."""
        return self._loader.state_dict() if self._loader and batches is self._batches else {}

    # Collectives.

    def _sums_for(self, name: str) -> Session | None:
        """The session, if all workers take part now; None if what this worker does is discarded."""
        session = self.session
        if not session.generation:
            raise ConfigError(
                f"fabric.{name}",
                "was called before the first batch: workers that join later would not take part. "
                "Call it in the training loop or after it, or compute the same on every worker",
            )
        return None if session.void or session.framework.is_late else session

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Before the first batch each worker is on its own."""
        if self.session.generation and (session := self._sums_for("barrier")):
            session.sum(0.0)
            self._show_rank()

    def _check_evaluated(self, name: str) -> None:
        if self._evaluated_whole:
            raise ConfigError(
                f"fabric.{name}",
                "was called after a DataLoader was evaluated, which every worker has done in full: "
                "a sum would count each sample as often as there are workers. Leave it out, the "
                "number is complete; if it is about training, call it before the evaluation; or "
                "share out the evaluation: `for batch in fabric.strategy.evaluate(loader)`",
            )

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The sum, or the mean as in one process: of a batch, weighted by workers' samples."""
        operation = str(reduce_op).lower().rpartition(".")[2]
        if operation == "sum":
            self._check_evaluated("all_reduce")
        if operation not in ("mean", "avg", "sum"):
            raise ConfigError("reduce_op", f"{reduce_op} is not supported: use 'mean' or 'sum'")
        if (
            not isinstance(tensor, torch.Tensor)
            or (session := self._sums_for("all_reduce")) is None
        ):
            return tensor
        is_mean = operation != "sum"
        weight = session.framework.weight if is_mean and self._in_batch else 1.0
        own = tensor.detach().double().reshape(-1).cpu()
        own = own * weight if weight else torch.zeros_like(own)  # a mean over nothing may be NaN
        total = session.sum(torch.cat([own, torch.tensor([weight], dtype=torch.float64)]))
        if session.void:
            return tensor
        values = (total[:-1] / total[-1] if is_mean else total[:-1]).reshape(tensor.shape)
        if is_mean and not tensor.is_floating_point():
            return values.to(tensor.device, torch.get_default_dtype())
        return tensor.detach().copy_(values)

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """The tensors of all workers, stacked."""
        if sync_grads:
            raise ConfigError(
                "fabric.all_gather",
                "sync_grads=True: use fabric.strategy.session.gather(features), which has a row "
                "for each sample of the batch, with gradients",
            )
        self._check_evaluated("all_gather")
        if (session := self._sums_for("all_gather")) is None or session.world == 1:
            return tensor
        gathered = gather(session.sum, {session.rank: to_bytes(tensor)}, session.world)
        if session.void:
            return tensor
        tensors = [from_bytes(gathered[rank], tensor.device) for rank in sorted(gathered)]
        if len(shapes := {tuple(t.shape) for t in tensors}) > 1:
            raise ConfigError(
                "fabric.all_gather",
                f"got tensors of {sorted(shapes)}, since workers have different shares of a batch: "
                "use fabric.strategy.session.gather(features) before the backward pass",
            )
        return torch.stack(tensors)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The leader's object."""
        if src:
            raise ConfigError("fabric.broadcast", f"src={src}: only the leader, 0, is always there")
        session = self._sums_for("broadcast")
        while session is not None and not session.void:
            own = {0: to_bytes(obj)} if session.is_leader else {}
            if got := gather(session.sum, own, 1):
                return from_bytes(got[0], self.root_device)
        return obj

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if (session := self._sums_for("strategy.reduce_boolean_decision")) is None:
            return decision
        votes, world = session.sum(torch.tensor([float(decision), 1.0])).tolist()
        if session.void:
            return decision
        return bool(votes == world if all else votes)

    # Files, and the end.

    def save_checkpoint(self, path: Any, state: Any, *args: Any, **kwargs: Any) -> None:
        """The leader writes; if it is lost meanwhile, the next one does."""
        self._check_left_early()
        session, is_written = self._sums_for("save"), False
        while session is not None and not (is_written or session.void):
            self._show_rank()
            super().save_checkpoint(path, state, *args, **kwargs)
            is_written = bool(session.sum(float(self.is_global_zero)))

    def teardown(self) -> None:
        """End this worker's part in the run, as the end of the script does."""
        self._close(None)
        super().teardown()

    def _close_at_exit(self) -> None:
        """The script ends without telling Fabric; an error of its own ends the run."""
        hook = sys.excepthook

        def failed(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            self._close(error)
            hook(kind, error, trace)

        sys.excepthook = failed
        atexit.register(self._close, None)

    def _close(self, error: BaseException | None) -> None:
        if (session := self._session) is None:
            return
        if error is None:
            error = session.framework.left
        if error is None and self._left_early:
            error = EvenstepError(self._left_early)
        self._session, self._in_batch = None, False
        session.__exit__(type(error) if error else None, error, None)
