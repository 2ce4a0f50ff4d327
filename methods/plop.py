"""PLOP (Douillard et al. 2021): the teacher labels the background, and features are held window by window.

    l_seg = nu * -log p_y over pseudo-labels        R = sqrt(C / C_new) / L * sum over L maps of Local POD

Pseudo-labels: where a label says background, u is the entropy of the teacher's softmax over log C_old, in [0,
1], and c its most probable class (the background is one of them). If u < tau_c the label becomes c, else the
pixel is left out. tau_c is set once before a step, by an epoch of teacher's outputs. nu, for each image, is
the share of its old pixels that kept a label; an image all of a new class has none and is left out, as the
code's num / (den + 1e-6) has it. Local POD (losses.local_pod) compares the four stages of the
backbone, the head and the logits, so L = 6. A new class starts as MiB's.

From the paper: all of this, with tau_c the median of u among the pixels predicted as c. As the reference
code, which differs from it or says more:
- The norm of a difference of embeddings is not squared. Stages are read before their activation, logits
  before upsampling; the scores of new classes are added to the background's. Weights 0.01 and, for the
  logits, 0.0005. C counts the background.
- `median=code`: its entropy is also divided by C_old log C, and is then at most 0.022 on the first step of
  VOC 15-1. With 100 bins on [0, 1] that leaves three, and the running sum that looks for the median's bin
  adds the bins' numbers instead of their pixels. So tau_c is not the median: where most pixels of a class
  fall into the first bin, it lies between 0.005 and 0.01 on that scale, and where no bin holds half of them
  (and there are 10,000 or more) every pixel passes. `median=paper` takes the median of u itself.
- tau_c is at least `minimum`, on the scale of either; a class that was never predicted gets that.
Our choices: histograms are summed over ranks, where the code's ranks have thresholds of their own. The median
of the paper is read from bins that are 1/128 of their value wide. True old labels, of the mode `sequential`,
stay.

`pod=pooled` is PCKD, what RCIL (Zhang et al. 2022) holds in place of Local POD: squares of the maps, averaged
over windows of 4, 8, ... 24 around every place, and over three neighbouring channels (all maps but the
logits; the head weighs as the logits do). Written from RCIL's code, without RCIL's second branch of the
network; its weights on VOC are PLOP's.

Published recipe: configs/recipes/plop.yaml; its numbers are those of `median=code`, of the mode `overlapped`
and of void pixels ignored. Trained as background (data.void), void pixels get pseudo-labels too.
"""

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from configs.registry import NonNegative, Settings
from data.protocols import BACKGROUND, IGNORE_INDEX
from methods.base import Method, register
from methods.losses.plain import pooled_channels, pooled_pod
from methods.ranks import summed

UNSURE = -1  # a background label without a pseudo-label: left out like void, but nu counts it
CODE_BINS = 100
PAPER_BINS = 0x3F80 + 1  # the leading 16 bits of the floats from 0 to 1


@register("plop")
class PLOP(Method):
    class Options(Settings):
        logits_ratio: NonNegative = 0.05  # weight of the logits' term relative to the others
        median: Literal["code", "paper"] = "paper"
        minimum: NonNegative = 0.001
        pod: Literal["local", "pooled"] = "local"  # what is held of the maps: Local POD, or RCIL's PCKD

    options: Options
    needs_teacher = True
    needs_stages = True
    strength = 0.01

    def __init__(self, cross_entropy: str = "all", **options: Any):
        super().__init__(cross_entropy, **options)
        self.thresholds: Tensor | None = None  # of u, by old class
        self.num_classes = 1

    def begin_step(self, model: nn.Module, step) -> None:
        super().begin_step(model, step)
        self.num_classes = step.num_classes
        self.thresholds = None

    def init_classifier(self, model: Any) -> None:
        model.init_new_from_background()

    def survey(self, images: Iterable[tuple[Tensor, Any]]) -> None:
        bins, bin_of, median_of = MEDIANS[self.options.median]
        scale = self.num_old * math.log(self.num_classes) if self.options.median == "code" else 1.0
        counts = torch.zeros(self.num_old * bins, dtype=torch.long)
        for labels, teacher in images:
            u, guess = uncertainty(teacher.logits)
            background = labels == BACKGROUND
            places = guess[background] * bins + bin_of(u[background] / scale)
            counts = counts.to(labels.device) + places.bincount(minlength=len(counts))
        medians = median_of(summed(counts).view(self.num_old, bins))
        self.thresholds = scale * medians.clamp(min=self.options.minimum)

    def targets(self, labels: Tensor, teacher) -> Tensor:
        if self.thresholds is None:
            raise RuntimeError("plop: pseudo-labels need the thresholds of `survey`")
        u, guess = uncertainty(teacher.logits)
        sure = u < self.thresholds.to(u.device)[guess]
        return torch.where(labels == BACKGROUND, guess.where(sure, UNSURE), labels)

    def segmentation_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.num_old == 1:  # step 0 is everybody's, to the last bit
            return self.losses.cross_entropy(logits, labels, self.mean_over)
        nu = share_of_sure(labels, self.num_old).to(logits.dtype)
        known = labels.masked_fill(labels == UNSURE, IGNORE_INDEX)
        return self.losses.weighted_cross_entropy(logits, known, nu, self.mean_over)

    def retention_losses(self, student, teacher) -> dict[str, Tensor]:
        *ours, scores = student.stages
        *theirs, old_scores = teacher.stages
        num, num_old = scores.shape[1], old_scores.shape[1]
        factor = math.sqrt(num / (num - num_old)) / len(student.stages)
        pod = self.losses.local_pod if self.options.pod == "local" else pooled_pod
        background = scores[:, :1] + scores[:, num_old:].sum(dim=1, keepdim=True)
        scores = torch.cat((background, scores[:, 1:num_old]), dim=1)
        terms: dict[str, Any] = {
            "features": factor * sum(pod(one, other) for one, other in zip(ours, theirs, strict=True)),
            "logits": factor * self.options.logits_ratio * pod(scores, old_scores),
        }
        if self.options.pod == "pooled":  # the mean over the maps without the logits
            *stages, head = map(pooled_channels, ours, theirs)
            held = sum(stages, self.options.logits_ratio * head)
            terms["channels"] = factor * len(student.stages) / len(ours) * held
        return terms

    def state_dict(self) -> dict[str, Any]:
        return {} if self.thresholds is None else {"thresholds": self.thresholds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.thresholds = state.get("thresholds")

    def handover(self) -> dict[str, dict[str, Any]]:
        return {}  # the next step has another teacher and surveys anew


def uncertainty(logits: Tensor) -> tuple[Tensor, Tensor]:
    """u, the entropy of softmax(logits) over its largest possible value,
    and the most probable class of each pixel.
    """
    log_q = logits.log_softmax(dim=1)
    entropy = -(log_q.exp() * log_q).sum(dim=1)
    return (entropy / math.log(logits.shape[1])).clamp(0.0, 1.0), logits.argmax(dim=1)


def share_of_sure(labels: Tensor, num_old: int) -> Tensor:
    """nu of each image: of its pixels that no new class holds, the share that has a label;
    0 without such pixels.
    """
    sure = ((labels >= 0) & (labels < num_old)).sum(dim=(1, 2))
    unsure = (labels == UNSURE).sum(dim=(1, 2))
    return sure.double() / (sure + unsure).clamp(min=1)


def code_bin(u: Tensor) -> Tensor:
    return (u * CODE_BINS).long().clamp(max=CODE_BINS - 1)


def code_median(counts: Tensor) -> Tensor:
    """Return what the reference code takes for the median of each row: see the top of this file."""
    medians = []
    for row in counts.tolist():
        half, before, median = sum(row) / 2, 0, 0.0
        for number, count in enumerate(row if half else ()):
            if before <= half <= before + count and count:
                median = (number + (half - before) / count) / CODE_BINS
                break
            before += number
        else:
            median = math.inf if half > before else 0.0
        medians.append(median)
    return torch.tensor(medians, dtype=torch.float32, device=counts.device)


def paper_bin(u: Tensor) -> Tensor:
    """Sign, exponent and seven bits of the fraction: floats of one sign are in the order of their bits."""
    return (u.float().abs().view(torch.int32) >> 16).long()


def paper_median(counts: Tensor) -> Tensor:
    """Return the median of each row, taken evenly spread within its bin; 0 for an empty row."""
    below = counts.cumsum(dim=1).double()
    half = below[:, -1:] / 2
    place = torch.searchsorted(below, half)
    count = counts.gather(1, place)
    part = (half - (below.gather(1, place) - count)) / count.clamp(min=1)
    lower, upper = ((edge.to(torch.int32) << 16).view(torch.float32) for edge in (place, place + 1))
    return (lower + part * (upper - lower)).squeeze(1).float()


MEDIANS = {"code": (CODE_BINS, code_bin, code_median), "paper": (PAPER_BINS, paper_bin, paper_median)}
