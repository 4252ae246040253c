"""This worker's copy of the training job: what the script gave it, and where it stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from evenstep.errors import ConfigError
from evenstep.train.comm.backend import ends_on_error, surviving_errors
from evenstep.train.comm.cards import card_of, card_random, on_cards, set_card_random
from evenstep.train.comm.group import CPU, Group, GroupGoneError
from evenstep.train.comm.host import ALONE, Host
from evenstep.train.data.loader import Loader
from evenstep.train.exchange import pulse_size
from evenstep.train.measure.meter import Meter
from evenstep.train.optimizer_settings import OptimizerSettings
from evenstep.train.plan.plans import LrScale, Plans
from evenstep.train.reduce.gather import FeatureGroup
from evenstep.train.reduce.loss_scale import LossScale
from evenstep.train.reduce.norm_layers import NormLayers
from evenstep.train.reduce.reducer import Reducer
from evenstep.train.step import Step
from evenstep.train.updates import Updates

MakeGroup = Callable[[str, torch.device], Group]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the script passed to `evenstep.join`."""

    settings: dict[str, Any] = field(default_factory=dict)
    cap: int | None = None
    min_share: int = 1
    seed: int = 0
    kind: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A prepared model, with everything that reduces and measures its steps."""

    module: torch.nn.Module
    device: torch.device
    reducer: Reducer
    norms: NormLayers
    meter: Meter


class Job:
    """The objects of one worker's training, shared by its session and its roster."""

    def __init__(self, options: Options, host: Host = ALONE) -> None:
        self.options, self.host = options, host
        self.step = Step()
        self.lr_scale = LrScale()
        self.plans = Plans(self.lr_scale)
        self.loss_scale = LossScale()
        self.stateful: dict[str, Any] = {}  # optimizers, schedulers, registered objects, by name
        self.settings = OptimizerSettings(self.step, self.stateful)
        self.updates = Updates(self.step, lambda: self.loader)
        self.is_over = False  # the session is closed
        self.num_epochs = 0  # 0: unknown, the script does not use session.epochs
        self._make_features: Callable[[], FeatureGroup]  # of the present generation
        self._features: FeatureGroup | None = None
        self._card = 0  # a number for the model's GPU
        self._model: Model | None = None
        self._loader: Loader | None = None

    @property
    def has_model(self) -> bool:
        """Whether the script has called `prepare`."""
        return self._model is not None

    @property
    def has_loader(self) -> bool:
        """Whether the script has called `loader`."""
        return self._loader is not None

    @property
    def model(self) -> Model:
        """The prepared model."""
        if self._model is None:
            raise ConfigError("session", "call session.prepare(model, ...) before the first batch")
        return self._model

    @model.setter
    def model(self, model: Model) -> None:
        self._model, self._card = model, card_of(model.device)
        self.step.on_fetched.append(model.meter.begin)

    @property
    def loader(self) -> Loader:
        """The loader of training batches."""
        if self._loader is None:
            raise ConfigError("session", "call session.loader(...) first")
        return self._loader

    @loader.setter
    def loader(self, loader: Loader) -> None:
        self._loader = loader

    @property
    def features(self) -> FeatureGroup:
        """Gathers features over the present generation. Most scripts never do."""
        if self._features is None:
            self._features = self._make_features()
        return self._features

    def forget_loader(self) -> None:
        """The loader was refused: the script may make another one."""
        self._loader = None

    def connect(
        self,
        control: Group,
        make: MakeGroup,
        *,
        on_wait: Callable[[float], None],
        on_lost: Callable[[GroupGoneError], None] | None = None,
    ) -> None:
        """Reduce over the groups of a generation, made by `make`; all ranks call it.

        `on_wait` is told how long the model waited for other workers in the middle of a pass. With
        `on_lost`, training survives the loss of a group.
        """
        model, elastic = self.model, on_lost is not None
        use_cards = control.world > 1 and on_cards(control, self._card, elastic=elastic)
        device = model.device if use_cards else CPU

        def join(name: str) -> Group:
            with surviving_errors(elastic and use_cards):
                group = make(name, device)
            group.sees_through = elastic or not ends_on_error()  # else errors would go unnoticed
            return group

        gradients = join("gradients") if use_cards else control
        model.reducer.regroup(gradients, control, pulse_size(control.world))
        if model.norms.is_any:
            model.norms.connect(control, join, self.step, on_wait, on_lost)
        self._features, self._make_features = (
            None,
            lambda: FeatureGroup(
                self.step,
                control.world,
                lambda: join("features"),
                on_wait,
                on_lost,
                is_over=lambda: self.is_over,
            ),
        )

    def plain_state(self) -> dict[str, Any]:
        """The training state beside the model and the stateful objects."""
        return {
            "step": self.step.num_taken,
            "unused": self.step.num_unused,
            "order": self.loader.state_dict(),
            "rate": self.lr_scale.state_dict(),
            "settings": self.settings.state_dict(),
            "random": torch.get_rng_state(),
            "card_random": card_random(self.model.device),
        }

    def load_plain_state(self, plain: dict[str, Any]) -> None:
        """Continue where another worker or a checkpoint is."""
        self.loader.load_state_dict(plain["order"])
        self.lr_scale.load_state_dict(plain["rate"])
        if "settings" in plain:  # older checkpoints have none
            self.settings.load_state_dict(plain["settings"])
        self.step.number, self.step.num_unused = plain["step"], plain["unused"]
        torch.set_rng_state(plain["random"])
        set_card_random(self.model.device, plain.get("card_random"))  # older checkpoints have none
