"""Training: epochs, steps, the best of them, and going on after a kill."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from slimctl.core.augmentations import parse_augmentations
from slimctl.core.contract import Progress
from slimctl.core.errors import OptionError, PassFailedError
from slimctl.training.augment import apply
from slimctl.training.checkpoint import Checkpoint
from slimctl.training.module import TrainableGraph
from slimctl.training.objective import Objective
from slimctl.training.samples import Part, Samples
from slimctl.training.schedule import optimizer_for, rate, set_rate
from slimctl.training.settings import Settings


@dataclass
class Trained:
    """How far a run is, or what it did.

    Attributes:
        losses: Mean of each epoch.
        metrics: Before training and after each epoch, more is better; empty when none is measured.
        kept: The epoch, from 1, whose weights were kept; 0 for those before training.
        epoch: How many epochs are over.
        step: How many steps of the current epoch are over.
        total: Sum of their losses.
        resumed_at: The step, over all epochs, at which this session began; 0 for the beginning.
        ended_early: Training stopped because the metric did not get better.
    """

    losses: list[float] = field(default_factory=list)
    metrics: list[float] = field(default_factory=list)
    kept: int = 0
    epoch: int = 0
    step: int = 0
    total: float = 0.0
    resumed_at: int = 0
    ended_early: bool = False

    @property
    def best(self) -> float:
        """The best metric so far; what is not a number is none."""
        return max((m for m in self.metrics if not math.isnan(m)), default=-math.inf)


class Training:
    """One run.

    Args:
        module: Learns. When the run is over it holds the best weights that were found, or the last
            ones when no metric is measured.
        samples: From what.
        objective: What for.
        settings: How.
        seed: Of order and augmentation.
        threads: Of torch; 0 leaves that to it.
        judge: Measures the module as it is, more is better; None when there is no metric. It is
            asked before the first epoch and after each.
        progress: Where to say how far the work is.
        checkpoint: Where the state goes now and then, and when the user interrupts.
        after_step: Called after each step, for what weights must keep.

    Raises:
        OptionError: There is no such device.
    """

    def __init__(
        self,
        module: TrainableGraph,
        samples: Samples,
        objective: Objective,
        settings: Settings,
        *,
        seed: int,
        threads: int,
        judge: Callable[[], float | None],
        progress: Progress,
        checkpoint: Checkpoint,
        after_step: Callable[[], None] | None = None,
    ) -> None:
        self._module, self._samples, self._objective = module, samples, objective
        self._settings, self._seed, self._threads = settings, seed, threads
        self._judge, self._progress, self._checkpoint = judge, progress, checkpoint
        self._after_step = after_step
        self._device = find_device(settings.device)
        self._augmentations = parse_augmentations(settings.augment)
        self._best: dict[str, Tensor] | None = None
        self._done = Trained()
        module.to(self._device)
        objective.extra.to(self._device)
        decaying, others = module.by_decay()
        self._optimizer = optimizer_for(
            settings, decaying, [*others, *objective.extra.parameters()]
        )
        self._parameters = [*module.parameters(), *objective.extra.parameters()]

    def run(self) -> Trained:
        """Trains to the end.

        Raises:
            PassFailedError: The loss is no longer a number.
            SampleError: Labels are missing or do not fit.
            KeyboardInterrupt: The user wants to stop; how far it came is on disk.
        """
        done = self._done
        with _reproducible(self._threads):
            if not (self._settings.resume and self._resumed()):
                self._measured()
            steps = self._samples.steps * self._settings.epochs
            left = steps - done.epoch * self._samples.steps - done.step
            batches = self._progress.track(self._batches(), total=left, label=self._label)
            with _Interrupts() as interrupts:
                for batch in batches:
                    share = (done.epoch * self._samples.steps + done.step) / steps
                    self._step(batch, min(share, 1.0), steps)
                    if interrupts.seen:
                        break
                    if self._checkpoint.due():
                        self._save()
                if interrupts.seen:
                    self._save()
                    raise KeyboardInterrupt
        if self._best is not None:
            self._module.load_state_dict(self._best)
        self._module.eval()
        self._checkpoint.remove()
        return done

    def _batches(self) -> Iterator[list[Part]]:
        """Batches of all epochs that are left; an epoch ends when its last step was made."""
        done = self._done
        while done.epoch < self._settings.epochs and not done.ended_early:
            yield from self._samples.epoch(self._seed, done.epoch, skip=done.step)
            self._end_epoch()

    def _step(self, batch: list[Part], share: float, steps: int) -> None:
        done = self._done
        self._module.train()
        generator = _generator(self._seed, done.epoch, done.step)
        self._optimizer.zero_grad(set_to_none=True)
        size = sum(part.size for part in batch)
        total = 0.0
        for part in batch:
            seen = self._seen(part, generator)
            found = self._module(seen.feeds, self._objective.tensors)
            loss = self._objective.loss(found, seen, share) * (part.size / size)
            loss.backward()
            total += loss.item()
        self._check("loss", total)
        if self._settings.clip_norm:
            norm = nn.utils.clip_grad_norm_(self._parameters, self._settings.clip_norm)
            self._check("norm of the gradient", norm.item())
        step = done.epoch * self._samples.steps + done.step
        set_rate(self._optimizer, self._settings.learning_rate * rate(self._settings, step, steps))
        self._optimizer.step()
        self._module.apply_masks()
        if self._after_step is not None:
            self._after_step()
        done.step += 1
        done.total += total

    def _check(self, what: str, number: float) -> None:
        if not math.isfinite(number):
            raise PassFailedError(
                "training",
                f"The {what} is {number} in epoch {self._done.epoch + 1}, step"
                f" {self._done.step + 1}",
                fix="lower --learning-rate, or set --clip-norm",
            )

    def _seen(self, part: Part, generator: torch.Generator) -> Part:
        """What the model gets to see of some samples."""
        if self._augmentations:
            part = replace(part, feeds=apply(self._augmentations, part.feeds, generator))
        return part.to(self._device)

    def _end_epoch(self) -> None:
        done, patience = self._done, self._settings.patience
        done.losses.append(done.total / max(done.step, 1))
        done.epoch, done.step, done.total = done.epoch + 1, 0, 0.0
        self._measured()
        done.ended_early = (
            bool(patience and done.metrics and done.epoch - done.kept >= patience)
            and done.epoch < self._settings.epochs
        )

    def _measured(self) -> None:
        """Measures the module as it is, and keeps it if it is the best so far."""
        self._module.eval()
        metric = self._judge()
        if metric is None:
            self._done.kept = self._done.epoch
            return
        if metric > self._done.best:
            self._done.kept = self._done.epoch
            self._best = _copied(self._module)
        self._done.metrics.append(metric)

    def _label(self) -> str:
        done = self._done
        text = f"training, epoch {min(done.epoch + 1, self._settings.epochs)}"
        if done.step:
            text += f", loss {done.total / done.step:.4g}"
        elif done.losses:
            text += f", loss {done.losses[-1]:.4g}"
        return f"{text}, metric {done.metrics[-1]:.4g}" if done.metrics else text

    # going on after a kill

    def _save(self) -> None:
        self._checkpoint.write(
            {
                "done": asdict(self._done),
                "module": self._module.state_dict(),
                "extra": self._objective.extra.state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "best": self._best,
            }
        )

    def _resumed(self) -> bool:
        """Whether there was a checkpoint to go on from."""
        found = self._checkpoint.read()
        if found is None:
            return False
        self._module.load_state_dict(found["module"])
        self._objective.extra.load_state_dict(found["extra"])
        self._optimizer.load_state_dict(found["optimizer"])
        self._best = found["best"]
        for name, value in found["done"].items():
            setattr(self._done, name, value)
        self._done.resumed_at = self._done.epoch * self._samples.steps + self._done.step
        return True


class _Interrupts:
    """Ctrl-C waits until a step, or a measurement, is over; the second one does not wait.

    What is saved in the middle of a step could not be continued as if nothing had happened.
    """

    def __init__(self) -> None:
        self.seen = False
        self._before: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # signals are for no other
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _note(self, number: int, frame: object) -> None:
        del number, frame
        self.seen = True
        self._restore()

    def _restore(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None


def find_device(name: str) -> torch.device:
    """A device that is there.

    Raises:
        OptionError: There is none of this name.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise OptionError("--device", f"'{name}' is no device", fix="use cpu or cuda") from error
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise OptionError(
                "--device", f"torch sees {count} CUDA devices here", fix="use --device cpu"
            )
    elif device.type != "cpu":
        raise OptionError("--device", f"'{name}' is not supported", fix="use cpu or cuda")
    return device


def _generator(*seeds: int) -> torch.Generator:
    state = np.random.SeedSequence(seeds).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]) >> 1)


def _copied(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


@contextmanager
def _reproducible(threads: int) -> Iterator[None]:
    """Algorithms that give the same every time, on so many threads; both belong to the process.

    Torch would also fill all memory that it asks for, for the sake of who reads what nobody wrote;
    that takes a twentieth of the time, and nothing here does.
    """
    before = torch.get_num_threads()
    strict = torch.are_deterministic_algorithms_enabled()
    memory: Any = torch.utils.deterministic  # torch adds what is read here when it is imported
    filled = memory.fill_uninitialized_memory
    torch.set_num_threads(threads or before)
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        memory.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(strict)
        torch.set_num_threads(before)
