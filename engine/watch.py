"""What follows each iteration: log, guard, measure, save, stop."""

import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from configs.errors import UserError
from data.protocols import Step
from engine import checkpoint
from engine.probe import Probe
from engine.ranks import StoppedBySignal, any_rank, greatest
from engine.run import Run
from methods import Weights
from metrics.health import FiniteGuard, NonFiniteLoss, NonFiniteWeights, find_not_finite
from models.segmenter import Segmenter
from tracking.progress import Progress

SECONDS_BETWEEN_WRITES = 1.0  # of progress.json
SECONDS_BETWEEN_MEETINGS = 2.0  # of the ranks, to hear whether one of them is asked to stop


class Watch:
    """Decides after each iteration of a step what there is to do."""

    def __init__(
        self,
        run: Run,
        step: Step,
        model: Segmenter,
        parts: Mapping[str, Any],  # what a checkpoint inside the step consists of
        loader: DataLoader,
        probe: Probe,
        progress: Progress,
        *,
        last: int,
        seconds: float,
        measured: dict[str, Any],
    ):
        self.run, self.step, self.model, self.parts, self.loader = run, step, model, parts, loader
        self.probe, self.progress, self.last = probe, progress, last
        self.guard, self.measured, self.seconds = FiniteGuard(), measured, seconds
        self.started = self.saved = self.met = time.monotonic()
        self.met_at = progress.done  # the iteration in which the ranks met last
        self.meeting = progress.done + 1  # and in which they meet next
        self._write_progress(progress.done)

    def after(self, iteration: int, terms: Mapping[str, Tensor], weights: Weights, lr: float) -> None:
        config = self.run.config.run
        self.guard.watch(iteration, terms)
        self._measure(iteration)
        save = config.checkpoint_every > 0 and iteration % config.checkpoint_every == 0
        if iteration % config.log_every == 0 or iteration == self.last:
            self.progress(iteration, terms, weights.learn, weights.keep, lr)
            self._stop_if_not_finite()
            if iteration == self.last or time.monotonic() - self.written >= SECONDS_BETWEEN_WRITES:
                self._write_progress(iteration)
        stop, overdue = self._requests(iteration)
        if (save or stop or overdue) and iteration < self.last:
            self._stop_if_not_finite(before_saving=iteration)
            self._save(iteration)
            if stop:
                where = f"step {self.step.index}, iteration {iteration} of {self.last}"
                raise StoppedBySignal(f"stopped at {where}: the same command resumes from here")

    def _requests(self, iteration: int) -> tuple[bool, bool]:
        """Return whether to stop, and whether a checkpoint is overdue: the same answer on all ranks,
        who meet only now and then.
        """
        ranks, now = self.run.ranks, time.monotonic()
        if iteration == self.last or (ranks.group is not None and iteration < self.meeting):
            return False, False
        overdue = 0 < 60 * self.run.config.run.checkpoint_minutes < now - self.saved
        pace = (now - self.met) / (iteration - self.met_at)  # seconds per iteration
        stop, save, pace = greatest(ranks, self.run.stop.requested, overdue, pace)
        self.met, self.met_at = now, iteration
        soon = max(1, min(int(SECONDS_BETWEEN_MEETINGS / max(pace, 1e-9)), self.run.config.run.log_every))
        self.meeting = iteration + soon
        return bool(stop), bool(save)

    def seconds_spent(self) -> float:
        """Return the seconds spent on the step so far, without what was measured."""
        return self.seconds + time.monotonic() - self.started

    def _measure(self, iteration: int) -> None:
        if iteration in self.probe.places:
            self.measure(self.probe.places[iteration], iteration)

    def measure(self, place: str, iteration: int | None = None) -> None:
        """Measure the model as it stands, if the step is measured at all; without an iteration at its end."""
        if not self.probe.places:
            return
        iteration = self.last if iteration is None else iteration
        began = time.monotonic()
        self.measured[place] = self.probe(self.model)
        metrics = {f"flatness/{name}": value for name, value in self.measured[place].items()}
        self.run.board.scalars(metrics, self.run.iterations_before(self.step) + iteration)
        self.started += time.monotonic() - began  # no cost of the method

    def _save(self, iteration: int) -> None:
        self.saved = time.monotonic()
        position = {"step": self.step.index, "iteration": iteration, "seconds": self.seconds_spent()}
        checkpoint.save_training(
            self.run.folder.resume_checkpoint,
            dict(self.parts),
            self.run.ranks,
            **position,
            flatness=self.measured,
        )
        self._write_progress(iteration)
        self.run.board.flush()  # or the curves would have a gap before the place where a killed run resumes

    def _write_progress(self, iteration: int) -> None:
        self.written = time.monotonic()
        if self.run.ranks.is_main:
            self.run.folder.write_progress(
                step=self.step.index, iteration=iteration, total=self.last, seconds=self.seconds_spent()
            )

    def _stop_if_not_finite(self, before_saving: int | None = None) -> None:
        """All ranks or none, for they save together. Before they do, the weights are looked at as well."""
        error = self._loss_that_is_not_finite()
        if error is None and before_saving is not None:
            state = {name: self.parts[name].state_dict() for name in ("model", "optimizer")}
            state["method"] = self.parts["method"].handover()
            error = not_to_be_saved(
                self.run, state, f"after iteration {before_saving} of step {self.step.index}"
            )
        stop_all_ranks(self.run, error)

    def _loss_that_is_not_finite(self) -> UserError | None:
        try:
            self.guard.check()
        except NonFiniteLoss as error:
            batches: Any = self.loader.batch_sampler
            data: Any = self.loader.dataset
            items = [item for part in batches.micro_batches(error.iteration) for item in part]
            names = ", ".join(data.samples[position].name for _, position in items)
            kept = f"the last good state is kept in {self.run.folder.path}"
            error.args = (f"{error}\n  images: {names}\n  {kept}",)
            return error
        return None


def not_to_be_saved(run: Run, state: Mapping[str, Any], when: str) -> NonFiniteWeights | None:
    """Return the error if something in the state is not finite.

    The losses need not show it: they come from before the update.
    """
    broken = find_not_finite(state)
    if broken is None:
        return None
    return NonFiniteWeights(
        f"the weights are not finite {when} ({broken}), and are not saved\n"
        f"  the last good state is kept in {run.folder.path}"
    )


def stop_all_ranks(run: Run, error: UserError | None) -> None:
    """Raise if there is an error on any rank: one that stops alone leaves the others waiting for it."""
    if any_rank(run.ranks, error is not None):
        raise error or NonFiniteWeights(
            "another rank has a loss or weights that are not finite, see its message"
        )
