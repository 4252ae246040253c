"""The Trainer: each of its batches is a step of the run, whatever happens to workers meanwhile.

Trainer owns the loop and counts in it. So forward and backward are repeated inside of
`training_step` when a worker was lost, and its loop never notices. A batch of the script's size is
shared out to all workers: the run is that of one process with the same arguments.

A mean over tokens is taken over all batches of an optimizer step. Their number is known at its end
only, so gradients accumulate as sums, and are divided then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from accelerate import PartialState
from transformers.trainer_callback import ProgressCallback

from evenstep.adapters.epoch import MovedError
from evenstep.adapters.hf.arguments import check_arguments
from evenstep.adapters.hf.batches import KeepsPosition, Placeholder, TrainerBatches
from evenstep.adapters.hf.evaluation import SharedPredictions
from evenstep.adapters.hf.progress import TrainerProgress
from evenstep.adapters.single_process import show_rank, without_torchrun
from evenstep.errors import ConfigError
from evenstep.train.data.loader import Loader
from evenstep.train.data.source import is_stream
from evenstep.train.join import join as join_run
from evenstep.train.session import Session

CONTINUED = "evenstep"  # stands for a checkpoint to resume from: the epoch is continued


class ElasticMixin(transformers.Trainer):
    """Before a class of Trainers: `class Mine(ElasticMixin, trl.SFTTrainer)`.

    `join` has arguments for `evenstep.join`, such as {"cap": 16}.
    """

    _session: Session | None = None  # while it trains
    _loader: Loader
    _batches: TrainerBatches
    _progress: TrainerProgress
    _has_result = True  # of the batch at hand; else this worker missed it, and has others' state
    prediction_step: Any
    preprocess_logits_for_metrics: Any

    def __init__(self, *args: Any, join: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._join_options = dict(join or {})
        with without_torchrun():
            super().__init__(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as a worker of the run, from where the run is."""
        self._check()
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        with join_run(**{"seed": seed, **self._join_options}) as session:
            self._session = session
            try:
                return super().train(*args, **kwargs)
            finally:
                self._session, self._prepared = None, None
                self.accelerator.__dict__.pop("backward", None)

    def _check(self) -> None:
        check_arguments(self.args, PartialState().distributed_type)
        ours: tuple[tuple[str, Any, str], ...] = (
            ("training_step", ElasticMixin, "override compute_loss instead"),
            ("get_batch_samples", ElasticMixin, "override compute_loss instead"),
            ("get_train_dataloader", transformers.Trainer, "give train_dataset and data_collator"),
            ("_get_train_sampler", transformers.Trainer, "evenstep chooses the samples of a batch"),
        )
        for name, owner, way_out in ours:
            if getattr(type(self), name) is not getattr(owner, name):
                raise ConfigError(
                    f"{type(self).__name__}.{name}", f"cannot be overridden here: {way_out}"
                )

    # Before the first batch.

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, *args: Any, **kwargs: Any
    ) -> Any:
        plain = super()._get_dataloader(dataset, description, batch_size, *args, **kwargs)
        if self._session is None or not kwargs.get("is_training"):
            return plain
        if is_stream(plain.dataset):
            raise ConfigError(
                "train_dataset",
                "is a stream: Trainer must know where an epoch ends. Give a dataset with a length",
            )
        self.create_optimizer()
        self._session.prepare(self.model, getattr(self.optimizer, "optimizer", self.optimizer))
        options = {"collate_fn": plain.collate_fn, "pin_memory": plain.pin_memory}
        if plain.num_workers:
            for name in (
                "num_workers",
                "prefetch_factor",
                "persistent_workers",
                "multiprocessing_context",
                "worker_init_fn",
            ):
                options[name] = getattr(plain, name)
        self._loader = self._session.loader(
            plain.dataset,
            batch=batch_size,
            shuffle=self.args.train_sampling_strategy != "sequential",
            drop_last=self.args.dataloader_drop_last,
            **options,
        )
        return self._loader

    def _init_training_state(
        self, max_steps: int, steps: int, epochs: int, resume_from_checkpoint: Any, trial: Any
    ) -> tuple[int, int]:
        """Create everything that has a state, then load the run's state into it."""
        if self._session is None:
            state: tuple[int, int] = super()._init_training_state(
                max_steps, steps, epochs, resume_from_checkpoint, trial
            )
            return state
        session, loader = self._session, self._loader
        if trial is not None:
            raise ConfigError("trial", "a hyperparameter search cannot run inside of a run")
        epoch, num_batches = super()._init_training_state(
            max_steps, steps, epochs, resume_from_checkpoint, trial
        )
        self._prepared = super()._prepare_for_training(max_steps, loader, resume_from_checkpoint)
        session.register("lr_scheduler", self.lr_scheduler)
        self._progress = TrainerProgress(self)
        self._batches = TrainerBatches(loader, self.args.gradient_accumulation_steps)
        session.register("trainer", self._progress)
        session.framework.owns("trainer")
        self.accelerator.backward = self._backward
        if resume_from_checkpoint is not None:
            self._load_rng_state(resume_from_checkpoint)
            loader.continue_at(epoch, num_batches)
        session.framework.enter()
        self._show_rank()
        return loader.epoch, loader.next_index

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> Any:
        if self._session is None:
            return super()._prepare_for_training(
                max_steps, train_dataloader, resume_from_checkpoint
            )
        return self._prepared

    # The loop.

    def _run_epoch(self, **arguments: Any) -> None:
        """Resume the epoch at the run's current batch; skip it if the run is past it."""
        if self._session is None:
            super()._run_epoch(**arguments)
            return
        self._progress.restore_losses()
        epoch, loader, state = arguments["epoch"], self._loader, self.state
        while loader.epoch <= epoch:
            if state.global_step >= state.max_steps:
                self.control.should_training_stop = True
                return
            begin = self._batches.begin(epoch)
            if begin >= len(loader):
                return
            arguments |= {
                "train_dataloader": self._batches,
                "resume_from_checkpoint": CONTINUED if begin else None,
                "epochs_trained": epoch,
                "steps_trained_in_current_epoch": begin,
            }
            try:
                with KeepsPosition():
                    super()._run_epoch(**arguments)
                return
            except MovedError:
                self._progress.restore_losses()

    def _load_rng_state(self, checkpoint: Any) -> None:
        if checkpoint != CONTINUED:  # the run's own state has it
            super()._load_rng_state(checkpoint)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Placeholders: a batch is taken from the loader when the one before it is done."""
        if self._session is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        return self._batches.take_window(num_batches), None

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """One step of the run: forward and backward, repeated while the step is void."""
        if self._session is None or not isinstance(inputs, Placeholder):
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
            return loss
        batch = next(self._batches) if inputs.taken is None else inputs.taken
        inputs.taken = None
        self.current_gradient_accumulation_steps = inputs.window
        self._progress.num_begun += 1
        step = super().training_step

        def compute(batch: Mapping[str, Any]) -> None:
            inputs.clear()
            inputs.update(batch)
            items = self._get_num_items_in_batch([batch], self.args.device)
            self._own_items = None if items is None else int(items)
            # Its own mean: a loss that takes no number of items returns that anyway.
            step(model, dict(batch), None if items is None else items.clamp(min=1))

        self._session.attempt(compute, batch)
        self._show_rank(in_loop=True)
        return self._end_batch(model)

    def _backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Replaces the accelerator's: gradients become the sum over the items of all workers."""
        session, items = self._session, self._own_items
        assert session is not None
        num = session.counted if items is None else items if session.counted else 0
        session.framework.count(num, num * float(loss.detach()) if num else 0.0)
        if items is not None:
            # A mean over no items may be NaN.
            factor = num / self._loader.batch.size / session.framework.share if num else 0.0
            loss = (loss if num else loss.nan_to_num()) * factor
        type(self.accelerator).backward(self.accelerator, loss, **kwargs)

    def _end_batch(self, model: Any) -> torch.Tensor:
        """Add a batch to those that accumulate; with the last, make gradients the mean."""
        assert self._session is not None
        progress, is_last = self._progress, self.accelerator.sync_gradients
        progress.num_done = progress.num_begun
        counts = self._session.framework.counts
        self._has_result = counts is not None
        if counts is not None:  # else the others have done what follows, and this is their state
            items, loss = counts
            if self._own_items is None:
                progress.loss += loss / items
            else:
                progress.items, progress.loss = progress.items + items, progress.loss + loss
            if is_last:
                progress.mean_loss = progress.loss / (progress.items or 1)
                if progress.items:
                    grads = [p.grad for p in model.parameters() if p.grad is not None]
                    torch._foreach_mul_(grads, self._loader.batch.size / progress.items)
                progress.items = progress.loss = 0.0
        mean_loss = progress.mean_loss if is_last else 0.0
        return torch.tensor(mean_loss, device=self.args.device)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)
        if self._session is None:
            return norm
        if self._has_result:
            self._progress.grad_norm = norm
        return self._progress.grad_norm

    def _get_learning_rate(self) -> Any:
        """The rate before the schedule's step, which the others may have taken already."""
        rate = super()._get_learning_rate()
        if self._session is None:
            return rate
        if self._has_result:
            self._progress.learning_rate = rate
        return self._progress.learning_rate

    # One writer, and numbers of the whole run.

    def _show_rank(self, *, in_loop: bool = False) -> None:
        """Make this process the one that writes and shows progress, if it leads."""
        assert self._session is not None
        rank = self._session.rank
        self.state.is_world_process_zero = self.state.is_local_process_zero = rank == 0
        is_new_leader = show_rank(rank) and rank == 0
        if is_new_leader and in_loop:  # it has no progress bar yet
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, ProgressCallback) and callback.training_bar is None:
                    callback.on_train_begin(self.args, self.state, self.control)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """The leader writes it; then the others look for the best one in the folder."""
        if self._session is None:
            super()._save_checkpoint(model, trial)
            return
        is_written = False
        while not is_written:  # if the leader is lost meanwhile, the next one writes it
            self._show_rank(in_loop=True)
            if self.args.should_save:
                super()._save_checkpoint(model, trial)
            is_written = bool(self._session.sum(float(self.args.should_save)))
        if not self.args.should_save:
            super()._save_checkpoint(model, trial)

    def _finalize_training(self, *args: Any) -> Any:
        """End training first: this may load the best checkpoint into the model."""
        if self._session is not None:
            self._session.framework.finish()
        return super()._finalize_training(*args)

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:
            super()._save_rng_state(output_dir)

    def floating_point_ops(self, inputs: Any) -> float:
        """Of the whole batch, assuming that others' samples are as long as this worker's."""
        own = float(super().floating_point_ops(inputs))
        return own if self._session is None else own / (self._session.framework.share or 1.0)

    # Evaluation.

    def _evaluate(self, trial: Any, ignore_keys: Any, skip_scheduler: bool = False) -> Any:
        if self._session is not None and skip_scheduler and self._progress.num_done:
            return None  # on start: the others have evaluated then
        return super()._evaluate(trial, ignore_keys, skip_scheduler)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """While training, by all workers together, with the batches of one process."""
        if self._session is None or self._session.world == 1:
            return super().evaluation_loop(dataloader, *args, **kwargs)
        if "inputs" in self.args.include_for_metrics:
            raise ConfigError("include_for_metrics", "'inputs' is not gathered over workers")
        shared = SharedPredictions(self._session, self.prediction_step, dataloader, self)
        reduce_logits, self.preprocess_logits_for_metrics = self.preprocess_logits_for_metrics, None
        self.prediction_step = shared
        try:
            stand_in = self.accelerator.prepare(shared.stand_in)
            return super().evaluation_loop(stand_in, *args, **kwargs)
        finally:
            del self.prediction_step
            self.preprocess_logits_for_metrics = reduce_logits


class Trainer(ElasticMixin):
    """Hugging Face's Trainer, trained by all workers of an `evenstep run` or of torchrun."""
