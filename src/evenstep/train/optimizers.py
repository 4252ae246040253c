"""Hooks on the script's optimizers: checks, the learning-rate factor, skipping void steps."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from functools import partial, update_wrapper
from typing import Any, Never

import torch
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from evenstep.errors import ConfigError, EvenstepError
from evenstep.train.job import Job
from evenstep.train.plan.plans import LrScale
from evenstep.train.reduce.reducer import STEP_AFTERWARDS
from evenstep.train.step import FORGOTTEN, Phase, Step

log = logging.getLogger("evenstep")

NO_BACKWARD = -1  # what autograd calls the running pass if there is none
MAX_FRAMES = 16  # between a scaler's step and a hook of the optimizer: a few wrappers


class OptimizerHooks:
    """Attached to every optimizer that was given to `session.prepare`."""

    def __init__(
        self,
        job: Job,
        *,
        hands_over_state: bool,
        is_leader: Callable[[], bool],
        world: Callable[[], int],
    ) -> None:
        self._job, self._is_leader, self._world = job, is_leader, world
        self._hands_over_state = hands_over_state
        self._lr_factor = LrFactor(job.lr_scale, job.step)
        self._attached: set[int] = set()
        self._is_stepping = self._warned = self._warned_of_others = False
        job.step.on_forgotten.append(self._forgotten)

    def attach(self, optimizer: torch.optim.Optimizer) -> list[Callable[[], None]]:
        """Hook into the steps of an optimizer. Returns functions that undo it."""
        self._attached.add(id(optimizer))
        return [
            optimizer.register_step_pre_hook(self._before_step).remove,
            self._lr_factor.attach(optimizer),
            optimizer.register_step_post_hook(self._after_step).remove,
        ]

    def watch_others(self) -> Callable[[], None]:
        """Refuse steps of optimizers of the model that are not attached, and warn of any others.

        Returns a function that ends this.
        """
        return register_optimizer_step_pre_hook(self._check_attached).remove

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        _check_after_backward(optimizer)
        self._check_reduced(optimizer)
        self._check_scaler()
        self._is_stepping = True

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._is_stepping = False
        step = self._job.step
        if self._hands_over_state:
            _check_at_hand(step)
        step.num_unused = 0
        self._job.updates.optimizer_stepped(optimizer, may_repeat=self._hands_over_state)

    def _check_attached(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if id(optimizer) in self._attached or self._is_stepping:  # or inside of one that is
            return
        known = self._job.model.reducer.known
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if any(id(p) in known for p in params):
            raise ConfigError(
                "optimizer",
                f"{type(optimizer).__name__} has parameters of the model, but was not given to "
                "session.prepare. Pass it along, also if another object calls its step: "
                "session.prepare(model, optimizer)",
            )

        if not self._warned_of_others and any(p.grad is not None for p in params):
            self._warn_of_others(optimizer)

    def _warn_of_others(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn once that another model is trained by each worker on its own share."""
        if not self._job.step.has_batch or self._world() < 2:
            return
        self._warned_of_others = True
        if self._is_leader():
            log.warning(
                "%s steps on parameters that are not in the model given to session.prepare: each "
                "of %d workers trains its own, which become different. If that is not on purpose, "
                "give both in one: session.prepare(torch.nn.ModuleList([model, other]), optimizer, "
                "...)",
                *(type(optimizer).__name__, self._world()),
            )

    def _check_reduced(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse to step on a gradient that is not reduced, even where this worker is alone."""
        model = self._job.model
        known = model.reducer.known
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) not in known and param.grad is not None:
                    raise EvenstepError(_not_reduced(param, model.module))

    def _check_scaler(self) -> None:
        scaler, loss_scale = _stepping_scaler(), self._job.loss_scale
        if scaler is None or loss_scale.knows(scaler):
            return
        if not self._hands_over_state:
            loss_scale.add(scaler)
        elif scaler.is_enabled():  # a disabled one has no state
            raise ConfigError(
                "scaler",
                "this GradScaler was not passed to session.prepare: joining workers would start "
                "with another scale, and a repeated step would update it twice. Use "
                "session.prepare(model, optimizer, scaler)",
            )

    def _forgotten(self) -> None:
        """Gradients pile up: an optimizer, or a call of its `step`, is probably missing."""
        if not self._attached:
            raise EvenstepError(
                f"session.prepare was given no optimizer, and {FORGOTTEN} batches have passed. "
                "Pass it to prepare along with the model, and call optimizer.step()."
            )
        if self._is_leader() and not self._warned:
            log.warning(
                "no optimizer passed to session.prepare has taken a step in %d batches. Unless you "
                "accumulate gradients on purpose, pass the optimizer to prepare and call "
                "optimizer.step().",
                FORGOTTEN,
            )
        self._warned = True


class LrFactor:
    """Scales learning rates for the duration of `optimizer.step()` only.

    Schedules, checkpoints and logs keep the user's own learning rate.
    """

    def __init__(self, lr_scale: LrScale, step: Step) -> None:
        self._lr_scale, self._step = lr_scale, step
        self._unscaled: dict[int, list[Any]] = {}  # the user's own rates during an optimizer step

    def attach(self, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        """Apply the factor in every step of this optimizer. Returns a function that detaches it."""
        hooks = (
            optimizer.register_step_pre_hook(self._apply),
            optimizer.register_step_post_hook(self._remove),
        )

        def detach() -> None:
            for hook in hooks:
                hook.remove()
            self._remove(optimizer)  # left over from a step that raised

        return detach

    def _apply(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._remove(optimizer)  # left over from a step that raised
        factor = self._lr_scale.at(self._step.batch.step)
        if factor != 1.0:
            groups = optimizer.param_groups
            self._unscaled[id(optimizer)] = [group["lr"] for group in groups]
            for group in groups:
                group["lr"] = group["lr"] * factor  # not in place: it may be a tensor

    def _remove(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group, lr in zip(
            optimizer.param_groups, self._unscaled.pop(id(optimizer), []), strict=False
        ):
            group["lr"] = lr


def _check_after_backward(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a step in a hook of a backward pass, which reduces gradients at its end only."""
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == NO_BACKWARD:
        return
    raise EvenstepError(
        f"{type(optimizer).__name__} steps inside of backward(), in a hook. {STEP_AFTERWARDS}"
    )


def _check_at_hand(step: Step) -> None:
    """Refuse gradients of earlier batches alone. Asked after a step: it may call a closure."""
    if step.phase is Phase.FETCHED and step.num_unused:
        raise EvenstepError(
            f"an optimizer stepped after batch {step.batch.step} was taken and before that batch's "
            "backward pass, by gradients of earlier ones. So gradients always wait between two "
            "batches: no worker could ever join there, and no checkpoint be written. Call "
            "optimizer.step() before you take the next batch; a loop that fetches ahead leaves "
            "that to the loader: session.loader(..., num_workers=2)."
        )


def _not_reduced(param: torch.Tensor, model: torch.nn.Module) -> str:
    """The error for a parameter whose gradient is not reduced."""
    name = next((f"{n}, " for n, p in model.named_parameters() if p is param), "")
    what = f"a parameter ({name}shape {tuple(param.shape)}) has a gradient of this worker alone: "
    if not name:
        return what + (
            "it is in the optimizer, but not in the model given to session.prepare. Give both in "
            "one: session.prepare(torch.nn.ModuleList([model, ...]), optimizer)."
        )
    return what + (
        "it was frozen, or not there, when session.prepare was called. Call prepare once the model "
        "is complete and everything that will ever train is unfrozen; after that, parameters may "
        "be frozen and unfrozen at any time."
    )


def _stepping_scaler() -> GradScaler | None:
    """In a hook of an optimizer: the GradScaler that called `optimizer.step()`, if any.

    A script may not have given its scaler to the session, and hooks do not learn of the caller.
    """
    if torch.compiler.is_compiling():
        return None
    frame = sys._getframe(1)
    for _ in range(MAX_FRAMES):
        if frame.f_back is None:
            break
        frame = frame.f_back
        if frame.f_code.co_name == "step":
            caller = frame.f_locals.get("self")
            if isinstance(caller, GradScaler):
                return caller
    return None


def skip_void_steps(
    step: Step,
    objects: Iterable[Any],
    before: Callable[[], None],
    scheduled: Callable[[LRScheduler], None],
) -> Callable[[], None]:
    """Skip the steps of optimizers and schedulers while the training step is void.

    Of those that are not skipped, calls `before` before every step of an optimizer, `scheduled`
    after every one of a scheduler. Returns a function that makes all of them step as before again.
    """
    releases = []
    for obj in objects:
        if isinstance(obj, torch.optim.Optimizer):
            releases.append(_skip_if_void(step, obj, before=before))
        elif isinstance(obj, LRScheduler):
            releases.append(_skip_if_void(step, obj, after=partial(scheduled, obj)))

    def release() -> None:
        for undo in reversed(releases):  # the last first: an object may be wrapped twice
            undo()

    return release


class GuardedStep:
    """The `step` of an optimizer or scheduler that is skipped while the training step is void."""

    def __init__(
        self,
        step: Step,
        take_step: Callable[..., Any],
        before: Callable[[], None],
        after: Callable[[], None],
    ) -> None:
        # Keep the mark that schedulers leave on `step`. First: it may be a GuardedStep itself.
        update_wrapper(self, take_step)
        self._step, self._take_step, self._before, self._after = step, take_step, before, after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._step.is_discarded:
            return None
        self._before()
        result = self._take_step(*args, **kwargs)
        self._after()
        return result

    @property
    def __func__(self) -> Never:
        """Read by the first scheduler of an optimizer, to leave its mark."""
        raise ConfigError(
            "scheduler",
            "make it before the first batch, and pass it along: session.prepare(model, optimizer, "
            "scheduler). On workers that join, this one would start over",
        )


def _nothing() -> None:
    pass


def _skip_if_void(
    step: Step,
    stepper: Any,
    before: Callable[[], None] = _nothing,
    after: Callable[[], None] = _nothing,
) -> Callable[[], None]:
    take_step = stepper.step
    original = {"step": stepper.__dict__["step"]} if "step" in stepper.__dict__ else {}

    guarded = GuardedStep(step, take_step, before, after)
    if isinstance(stepper, torch.optim.Optimizer):
        stepper.__dict__["step"] = guarded  # as schedulers do

        def undo() -> None:
            if stepper.__dict__.get("step") is guarded:  # else a scheduler has wrapped it since
                del stepper.__dict__["step"]
                stepper.__dict__.update(original)
    else:
        # A scheduler's attributes are its state_dict, so none may be added: change its class.
        kind = type(stepper)
        stepper.__class__ = type(kind.__name__, (kind,), {"step": staticmethod(guarded)})

        def undo() -> None:
            stepper.__class__ = kind

    return undo


def check_schedulers(objects: Iterable[Any]) -> None:
    """Raise if an optimizer has a scheduler that was not given to the session."""
    objects = list(objects)
    known = {id(obj.optimizer) for obj in objects if isinstance(obj, LRScheduler)}
    for optimizer in objects:
        if not isinstance(optimizer, torch.optim.Optimizer) or id(optimizer) in known:
            continue
        if hasattr(optimizer.step, "_wrapped_by_lr_sched"):  # a mark that schedulers leave
            raise ConfigError(
                "scheduler",
                f"the scheduler of {type(optimizer).__name__} is not known to the run: joining "
                "workers would start it over. Pass it along: session.prepare(model, optimizer, "
                "scheduler)",
            )
