"""The losses of every method, as pure functions.

Shapes: `logits` and `student` are (B, C, H, W) with C = C_old + C_new, background first; `teacher` is (B,
C_old, H, W); `labels` is (B, H, W) with IGNORE_INDEX for void. p = softmax(student), q = softmax(teacher).
All work in log space and none builds a probability tensor over all C classes.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from data.protocols import IGNORE_INDEX
from methods.ranks import averaged


def cross_entropy(logits: Tensor, labels: Tensor, mean_over: str = "all") -> Tensor:
    """Return -log p_y, averaged over all pixels (MiB's code: void counts in the denominator)
    or over the valid ones.
    """
    total = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    return total / num_pixels(labels, mean_over)


def weighted_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor, mean_over: str = "all") -> Tensor:
    """Return -log p_y times the weight of its image (`weights` is (B,)), averaged as cross_entropy."""
    per_pixel = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
    return (per_pixel.sum(dim=(1, 2)) * weights).sum() / num_pixels(labels, mean_over)


def unbiased_cross_entropy(logits: Tensor, labels: Tensor, num_old: int, mean_over: str = "all") -> Tensor:
    """MiB Eq. 5: an old label says only "one of the old classes": -log sum_{c < num_old} p_c;
    a new one is plain CE.

    At step 0 the background is the only old class (num_old = 1) and this is cross_entropy, to the last bit.
    """
    if num_old == 1:
        return cross_entropy(logits, labels, mean_over)
    everything = logits.logsumexp(dim=1, keepdim=True)
    any_old = logits[:, :num_old].logsumexp(dim=1, keepdim=True)
    log_p = torch.cat((any_old, logits[:, num_old:]), dim=1) - everything
    merged = torch.where(labels == IGNORE_INDEX, labels, (labels - (num_old - 1)).clamp(min=0))
    total = F.nll_loss(log_p, merged, ignore_index=IGNORE_INDEX, reduction="sum")
    return total / num_pixels(labels, mean_over)


def distillation(student: Tensor, teacher: Tensor) -> Tensor:
    """LwF: -(1/C_old) sum_{c < C_old} q_c log softmax(student[:, :C_old])_c, averaged over pixels."""
    num_old = teacher.shape[1]
    log_p = student[:, :num_old].log_softmax(dim=1)
    return -(teacher.softmax(dim=1) * log_p).sum(dim=1).mean() / num_old


def unbiased_distillation(student: Tensor, teacher: Tensor) -> Tensor:
    """MiB Eq. 8: the teacher's background q_0 is matched by the student's background
    and new classes together.

    -(1/C_old) [ q_0 log(p_0 + sum_new p_c) + sum_{1 <= c < C_old} q_c log p_c ], averaged over pixels.
    """
    num_old = teacher.shape[1]
    everything = student.logsumexp(dim=1, keepdim=True)
    background = torch.cat((student[:, :1], student[:, num_old:]), dim=1).logsumexp(dim=1, keepdim=True)
    log_p = torch.cat((background, student[:, 1:num_old]), dim=1) - everything
    return -(teacher.softmax(dim=1) * log_p).sum(dim=1).mean() / num_old


def binary_cross_entropy(logits: Tensor, labels: Tensor, mean_over: str = "all") -> Tensor:
    """LwF-MC: one sigmoid per class, binary cross-entropies summed over classes and averaged over pixels."""
    valid = labels != IGNORE_INDEX
    one_hot = torch.zeros_like(logits)
    one_hot.scatter_(1, labels.where(valid, 0).unsqueeze(1), 1.0)
    per_pixel = F.binary_cross_entropy_with_logits(logits, one_hot, reduction="none").sum(dim=1)
    return (per_pixel * valid).sum() / num_pixels(labels, mean_over)


def binary_distillation(student: Tensor, teacher: Tensor) -> Tensor:
    """LwF-MC: sum over old classes of BCE(student, sigmoid(teacher)), averaged over pixels."""
    old = student[:, : teacher.shape[1]]
    return F.binary_cross_entropy_with_logits(old, teacher.sigmoid(), reduction="none").sum(dim=1).mean()


def foreground_cross_entropy(logits: Tensor, labels: Tensor, first: int, pos_weight: float = 1.0) -> Tensor:
    """DKD: one sigmoid for each of the labels from `first` on, nothing for the background. Binary
    cross-entropies are summed over classes and averaged over pixels; what has another label, void too, is
    negative. A positive pixel weighs `pos_weight`.
    """
    classes = torch.arange(first, first + logits.shape[1], device=logits.device)
    one_hot = (labels[:, None] == classes[:, None, None]).to(logits.dtype)
    # -w y log s(z) - (1 - y) log(1 - s(z)), where log s(z) = z - softplus(z) and log(1 - s(z)) = -softplus(z)
    per_class = F.softplus(logits) * (1 + (pos_weight - 1) * one_hot) - pos_weight * one_hot * logits
    return per_class.sum(dim=1).mean()


def confidence(logits: Tensor) -> Tensor:
    """CPR: KL(p || uniform) = log C - H(p), averaged over pixels."""
    log_p = logits.log_softmax(dim=1)
    return math.log(logits.shape[1]) + (log_p.exp() * log_p).sum(dim=1).mean()


def feature_distillation(student: Tensor, teacher: Tensor) -> Tensor:
    """ILT: mean squared difference of the backbone's features, in single precision at least."""
    dtype = torch.promote_types(student.dtype, torch.float32)
    return F.mse_loss(student.to(dtype), teacher.to(dtype))


def local_pod(student: Tensor, teacher: Tensor, scales: Sequence[int] = (1, 2, 4)) -> Tensor:
    """PLOP: the distance between the embeddings of two maps of equal shape, averaged over images.

    The embedding of a map: its squares are cut into s x s windows of equal size for each scale s (a remainder
    at the right and at the bottom is left out), and each window gives its mean over the width and its mean
    over the height. A scale that is finer than the map is left out.
    """
    squares = _squares(student) - _squares(teacher)  # embedding is linear from here on
    height, width = squares.shape[2:]
    parts = []
    for s in scales:
        rows, columns = height // s, width // s  # of a window
        if rows and columns:
            cut = squares[:, :, : s * rows, : s * columns]
            windows = cut.unflatten(3, (s, columns)).unflatten(2, (s, rows))
            parts += [windows.mean(dim=5).flatten(1), windows.mean(dim=3).flatten(1)]
    return _distance(torch.cat(parts, dim=1))


def pooled_pod(student: Tensor, teacher: Tensor, sizes: Sequence[int] = (4, 8, 12, 16, 20, 24)) -> Tensor:
    """RCIL: the distance between the squares of two maps, averaged over windows around every place, the mean
    over the sizes of windows and over images. Beyond its border a map is zero.
    """
    squares = _squares(student) - _squares(teacher)  # averaging is linear
    distances = [_distance(F.avg_pool2d(squares, size, stride=1, padding=size // 2)) for size in sizes]
    return sum(distances[1:], distances[0]) / len(sizes)


def pooled_channels(student: Tensor, teacher: Tensor, size: int = 3) -> Tensor:
    """RCIL: the same distance, of averages over neighbouring channels of every place."""
    squares = (_squares(student) - _squares(teacher)).transpose(1, 2)  # B x H x C x W
    return _distance(F.avg_pool2d(squares, (size, 1), stride=1, padding=(size // 2, 0)))


def _squares(maps: Tensor) -> Tensor:
    return maps.to(torch.promote_types(maps.dtype, torch.float32)).square()


def _distance(difference: Tensor) -> Tensor:
    return torch.linalg.vector_norm(difference.flatten(1), dim=1).mean()


def num_pixels(labels: Tensor, mean_over: str) -> Tensor | int:
    """Return the denominator of a pixel mean.

    Ranks average their gradients, so the valid pixels are counted over all of them. With gradient
    accumulation the micro-batches of an update still weigh alike, whatever their number of valid pixels.
    """
    if mean_over == "all":
        return labels.numel()
    if mean_over != "valid":
        raise ValueError(f"mean_over is 'all' or 'valid', not {mean_over!r}")
    count = averaged((labels != IGNORE_INDEX).sum().float())
    return count.clamp(min=1e-6)  # a batch that is void throughout has loss 0, not NaN
