"""STAR (Chen et al. 2023): old classes are replayed as statistics of features, and held where they are seen.

DKD's sigmoids without its auxiliary classifier. At the end of a step, of every new class: a prototype mu (the
mean direction of the head's features on its pixels), the deviation sigma of directions from it by dimension,
mean m and deviation s of the features' norms, and the number of its pixels. From step 1 on, with features
f = (mu + sigma e)(m + s e'), e and e' ~ N(0, 1), as many of an old class in an epoch as it had pixels,

    l_seg = [BCE(z_new, y; pos_weight) + w_f BCE(z_new(f), 0) + w_b BCE(z_new on bg, 0)] / (1 + w_f + w_b)
    R = mean |x - x_T|^2 + 0.01 mean over new classes of 1 / min |mu_new - mu_old|        strength 5

f, and the background of the batch once more, make up for the pixels of earlier steps: w_f and w_b are their
numbers relative to the batch's, at the resolution of the features. x are the head's features, in R where the
label says background and the teacher sees an object; mu_new is that of the batch.

As the authors' code, which says more than the paper or differs from it:
- The teacher sees an object where one of its *logits*, not sigmoids, exceeds 1/2. e' is drawn by dimension.
- Overlapped, old images come back: old pixels that the teacher finds are not drawn again, of the background
  1 - 0.01 |new| is taken, less half of what the step itself has, which then also counts half.
- Learning rates, relative to the head's: backbone 0.1, new classifier 10 in later steps. Norms are frozen.
Not as the code: sigma of a new class is about its own prototype; in later steps the code takes that of the
old class in its place of the list. Sigma comes from sums of one pass instead of a second pass.

Published recipe: DKD's (configs/recipes/dkd.yaml) with batch 24. STAR-M: method.memory=50, concatenated.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from configs.registry import NonNegative, Settings
from data.protocols import BACKGROUND, Step
from methods.base import register
from methods.dkd import DKD
from methods.prototypes import at_features, class_statistics
from methods.ranks import is_distributed, summed
from models.upsample import enlarge

SEEN = -1  # a background label where the teacher sees an object
APART = 0.01  # weight of the second term of R relative to the first: published 0.05 and 5
STATISTICS = ("numbers", "prototypes", "noise", "norms")


@register("star")
class STAR(DKD):
    class Options(Settings):
        pos_weight: NonNegative = 4.0  # of positive pixels
        body_lr: NonNegative = 0.1  # learning rate of the backbone, relative to the head's
        new_lr: NonNegative = 10.0  # of the new classifier in later steps

    options: Options  # type: ignore[assignment]  # none of DKD's code that remains asks for its other ones
    numbers = prototypes = noise = norms = torch.zeros(0)  # by class; `numbers` has the background first
    drawn: Tensor | None = None  # the class of every feature that an iteration draws
    extra_background = 0.0  # how often the background of a batch counts once more
    updates = 0  # in this step: from which the random features follow
    step: Step

    def add_classifier(self, model: Any, step) -> None:
        model.add_classes(step.num_new)

    def init_classifier(self, model: Any) -> None:
        pass

    def begin_step(self, model: Any, step) -> None:
        super().begin_step(model, step)
        self.step, self.drawn, self.extra_background, self.updates = step, None, 0.0, 0

    def parameter_groups(self, model: Any) -> list[dict[str, Any]]:
        *old, new = model.classifiers
        return [
            {"params": list(model.body.parameters()), "lr_scale": self.options.body_lr},
            {"params": [p for part in (model.head, *old) for p in part.parameters()]},
            {"params": list(new.parameters()), "lr_scale": self.options.new_lr if old else 1.0},
        ]

    # ---- the numbers of old pixels, and which features to draw

    def survey(self, images: Iterable[tuple[Tensor, Any]]) -> None:
        found, batches = torch.zeros(self.num_old), 0
        for labels, teacher in images:
            guess = self._guess(teacher.logits)
            places = at_features(guess.where(labels == BACKGROUND, SEEN), teacher.hidden)
            found = found.to(places.device) + torch.stack([(places == c).sum() for c in range(self.num_old)])
            batches += 1
        found = summed(found).cpu()
        background, old = self.numbers[0], self.numbers[1:]
        if self.mode == "overlapped":
            background = background * (1 - 0.01 * self.step.num_new)
            self.extra_background = max(0.0, float(background / found[0].clamp(min=1)) - 0.5)
            left = (old - found[1:]).clamp(min=0)
            self.numbers = torch.cat([(background + 0.5 * found[0])[None], old])
        else:
            self.extra_background, left = float(background / found[0].clamp(min=1)), old
            self.numbers = self.numbers + found
        self.drawn = torch.arange(len(old)).repeat_interleave((left / batches).long())

    def targets(self, labels: Tensor, teacher) -> Tensor:
        return torch.where((labels == BACKGROUND) & (self._guess(teacher.logits) != BACKGROUND), SEEN, labels)

    @staticmethod
    def _guess(logits: Tensor) -> Tensor:
        largest, output = logits[:].max(dim=1)  # a tensor, whatever the logits are
        return torch.where(largest > 0.5, output + 1, BACKGROUND)

    # ---- the terms

    def outputs(self, network: Any, hidden: Tensor) -> Mapping[str, Tensor]:
        if len(network.classifiers) == self.step.index or self.drawn is None or not torch.is_grad_enabled():
            return {}  # the teacher, which has no classifier for the new classes; step 0; an evaluation
        new = network.classifiers[-1]
        fakes = self._draw(hidden)
        return {"new": new(hidden), "fakes": F.linear(fakes, new.weight.flatten(1), new.bias)}

    def _draw(self, like: Tensor) -> Tensor:
        """Return the features of an iteration: the same whenever it asks."""
        assert self.drawn is not None
        generator = None if like.device.type == "meta" else torch.Generator(like.device)
        if generator is not None:
            generator.manual_seed(self.updates)
        rank, world = (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)
        self._go_to(like.device)
        classes = self.drawn[rank::world]
        mu, sigma, norms = (t[classes].to(like.dtype) for t in (self.prototypes, self.noise, self.norms))
        e, more = torch.randn(2, *mu.shape, generator=generator, device=like.device, dtype=like.dtype)
        return (mu + sigma * e) * (norms[:, :1] + norms[:, 1:] * more)

    def _go_to(self, device: torch.device) -> None:
        """Keep what every iteration uses on the device: it is copied there once a step."""
        assert self.drawn is not None
        if self.drawn.device != device:
            self.drawn = self.drawn.to(device)
            for name in ("prototypes", "noise", "norms"):
                setattr(self, name, getattr(self, name).to(device))

    def learn(self, student, batch) -> Tensor:
        first = self.num_old
        loss = self.losses.foreground_cross_entropy(
            student.logits[:, first - 1 :], batch.labels, first, self.options.pos_weight
        )
        if not student.extra:
            return loss
        places = batch.labels[:, 0, 0].numel() * student.hidden[0, 0].numel()  # pixels of the features
        background = at_features(batch.labels, student.hidden) == BACKGROUND
        fakes, again = student.extra["fakes"], F.softplus(student.extra["new"]) * background[:, None]
        w_fakes, w_background = len(fakes) / places, self.extra_background * background.sum() / places
        total = loss + F.softplus(fakes).sum() / places + self.extra_background * again.sum() / places
        return total / (1 + w_fakes + w_background)

    def keep(self, student, teacher, batch) -> dict[str, Tensor]:
        size = (student.hidden.shape[-2], student.hidden.shape[-1])
        seen = enlarge((batch.labels == SEEN)[:, None].to(student.hidden.dtype), size)
        squares = (student.hidden - teacher.hidden).square().mean(dim=1, keepdim=True)
        return {
            "features": (squares * seen).sum() / seen.sum().clamp(min=1e-6),
            "apart": APART * self._nearness(student.hidden, batch.labels, size),
        }

    def _nearness(self, hidden: Tensor, labels: Tensor, size: tuple[int, int]) -> Tensor:
        """Return the mean over new classes of 1 / distance to the nearest old prototype."""
        new = torch.arange(self.num_old, self.step.num_classes, device=labels.device)
        where = enlarge((labels[:, None] == new[:, None, None]).to(hidden.dtype), size)
        centres = torch.einsum("bkhw,bchw->kc", where, F.normalize(hidden, dim=1))
        self._go_to(hidden.device)
        gaps = F.normalize(centres, dim=1)[:, None] - self.prototypes.to(hidden.dtype)[None]
        return (1 / gaps.square().sum(dim=2).clamp(min=1e-12).sqrt().amin(dim=1)).mean()

    def after_backward(self, model: Any, weights, learning_rate: float) -> dict[str, Tensor]:
        self.updates += 1
        return {}

    # ---- the statistics of a step

    def review(self, images: Iterable[tuple[Tensor, Any]]) -> None:
        classes = range(self.num_old, self.step.num_classes)
        background, number, new = class_statistics(images, classes)
        first = self.step.index == 0
        for name, value in new.items():
            setattr(self, name, value if first else torch.cat([getattr(self, name).cpu(), value]))
        self.numbers = torch.cat([background[None] if first else self.numbers, number])

    def state_dict(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in STATISTICS}
        position = {"updates": self.updates, "extra_background": self.extra_background}
        return state | position | ({} if self.drawn is None else {"drawn": self.drawn})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in STATISTICS:
            setattr(self, name, state[name].cpu())
        self.updates, self.extra_background = state.get("updates", 0), state.get("extra_background", 0.0)
        self.drawn = state["drawn"].cpu() if "drawn" in state else None

    def handover(self) -> dict[str, dict[str, Any]]:
        return {self.name: {name: getattr(self, name).cpu() for name in STATISTICS}}
