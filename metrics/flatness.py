"""How flat a loss is where a model stands: gradient norm, curvature and sharpness. `python -m
scripts.flatness` reports them.

Every measure takes a scalar `loss(batch)`, the `batches` over which it is averaged, all of the same weight,
and the `parameters` it is a function of. Vectors over all parameters are flat, in the order of the
parameters. Curvature needs a loss that can be differentiated twice: the norm `abn` and the plain losses.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh
from torch import Tensor, nn
from tqdm import tqdm

Loss = Callable[[Any], Tensor]


@contextmanager
def restored(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Hands out a copy of the tensors and gives them their values back afterwards."""
    kept = [t.detach().clone() for t in tensors]
    try:
        yield kept
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, kept, strict=True):
                tensor.copy_(value)


@contextmanager
def norm_mode(model: nn.Module, mode: str) -> Iterator[None]:
    """Norms use their running statistics ("eval") or those of each batch ("train");
    the running ones stay what they were.
    """
    if mode not in ("eval", "train"):
        raise ValueError(f"the norm mode is 'eval' or 'train', not {mode!r}")
    was_training = model.training
    with restored(list(model.buffers())):
        model.train(mode == "train")
        try:
            yield
        finally:
            model.train(was_training)


def mean_loss(loss: Loss, batches: Sequence) -> Tensor:
    """Return the loss over all batches, in double precision;
    a loss of several values gives the mean of each.
    """
    with torch.no_grad():
        return torch.stack([loss(batch).double() for batch in batches]).mean(dim=0)


def gradients(loss: Loss, batches: Sequence, parameters: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the flat gradient on each batch."""
    for batch in batches:
        yield flatten(torch.autograd.grad(loss(batch), parameters, materialize_grads=True))


def gradient_norms(loss: Loss, batches: Sequence, parameters: Sequence[Tensor]) -> tuple[float, float]:
    """||mean_B g_B||^2, of the loss over all batches, and mean_B ||g_B||^2, of a single batch.

    A pair of Theorem 1 on one batch moves against the gradient of that batch's ||g_B||^2: on average, of the
    second.
    """
    total, squares = torch.zeros(()), 0.0
    for gradient in gradients(loss, batches, parameters):
        total = total + gradient
        squares += gradient.norm().item() ** 2
    return (total.norm().item() / len(batches)) ** 2, squares / len(batches)


def curvature(loss: Loss, batch: Any, parameters: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
    """v -> H v on one batch. Its gradient is computed once, and its graph lives as long as the function."""
    gradient = torch.autograd.grad(loss(batch), parameters, create_graph=True, materialize_grads=True)
    curved = [i for i, g in enumerate(gradient) if g.requires_grad]
    first = [gradient[i] for i in curved]

    def product(vector: Tensor) -> Tensor:
        if not curved:
            return torch.zeros_like(vector)
        parts = split_like(vector, parameters)
        weights = [parts[i] for i in curved]
        return flatten(
            torch.autograd.grad(first, parameters, weights, materialize_grads=True, retain_graph=True)
        )

    return product


def hessian_product(loss: Loss, batches: Sequence, parameters: Sequence[Tensor], vector: Tensor) -> Tensor:
    """H v, batch by batch: the memory is that of one batch."""
    products = (curvature(loss, batch, parameters)(vector) for batch in batches)
    return sum(products, torch.zeros_like(vector)) / len(batches)


def top_eigenvalues(
    loss: Loss,
    batches: Sequence,
    parameters: Sequence[Tensor],
    count: int,
    *,
    seed: int = 0,
    tolerance: float = 1e-3,
    restarts: int = 30,
) -> list[float]:
    """Return the `count` largest eigenvalues of the Hessian, in descending order;
    fewer where not all of them converged.

    By ARPACK's Lanczos (scipy's eigsh) rather than a recurrence of our own: it reorthogonalises fully, stops
    by the residual (at `tolerance` times the eigenvalue) and, restarting, keeps max(20, 2 count + 1) vectors
    however many products it takes.
    """
    like, generator = flatten(parameters), torch.Generator().manual_seed(seed)
    start = torch.randn(len(like), generator=generator, dtype=like.dtype)
    # With a single batch its graph can stay; that of several would take the memory of all.
    multiply = (
        curvature(loss, batches[0], parameters)
        if len(batches) == 1
        else partial(hessian_product, loss, batches, parameters)
    )
    if len(like) == 1:  # too small for ARPACK
        return [multiply(torch.ones_like(like)).item()]
    with tqdm(desc="eigenvalues", unit="product", leave=False, disable=None) as bar:

        def product(vector: np.ndarray) -> np.ndarray:
            bar.update()
            return multiply(torch.from_numpy(vector).to(like)).cpu().numpy()

        hessian = LinearOperator((len(like), len(like)), matvec=product, dtype=start.numpy().dtype)
        options = {"which": "LA", "v0": start.numpy(), "tol": tolerance, "maxiter": restarts}
        try:
            values = eigsh(hessian, min(count, len(like) - 1), return_eigenvectors=False, **options)
        except ArpackNoConvergence as error:
            values = error.eigenvalues
    return sorted(map(float, values), reverse=True)


def hessian_trace(
    loss: Loss, batches: Sequence, parameters: Sequence[Tensor], probes: int, *, seed: int = 0
) -> tuple[float, float]:
    """tr H by Hutchinson's estimator, the mean of v^T H v over random signs v, and its standard error."""
    like, samples = flatten(parameters), np.zeros(probes)
    with tqdm(total=len(batches) * probes, desc="trace", unit="product", leave=False, disable=None) as bar:
        for batch in batches:
            multiply = curvature(loss, batch, parameters)
            generator = torch.Generator().manual_seed(seed)  # the same signs on every batch
            for probe in range(probes):
                signs = (2 * torch.randint(2, (len(like),), generator=generator) - 1).to(like)
                samples[probe] += torch.dot(signs, multiply(signs)).item() / len(batches)
                bar.update()
    return float(np.mean(samples)), float(np.std(samples, ddof=1) / np.sqrt(probes))


def sharpness(
    loss: Loss, batches: Sequence, parameters: Sequence[Tensor], epsilon: float = 1e-3, steps: int = 5
) -> float:
    """epsilon-sharpness in percent (Keskar et al. 2017, Eq. 4, in the whole space):

        100 (max_y L(theta + y) - L(theta)) / (1 + L(theta))    over the box |y_i| <= epsilon (|theta_i| + 1)

    The maximum is searched by `steps` steps along the sign of the gradient, each of 2 / steps of the box and
    kept inside it, where the original uses L-BFGS-B: what is found is a lower bound.
    """
    at_rest = highest = mean_loss(loss, batches).item()
    with restored(parameters) as centre:
        reach = [epsilon * (c.abs() + 1) for c in centre]
        for _ in tqdm(range(steps), "sharpness", unit="step", leave=False, disable=None):
            ascent = split_like(sum(gradients(loss, batches, parameters), torch.zeros(())), parameters)
            with torch.no_grad():
                for p, c, r, g in zip(parameters, centre, reach, ascent, strict=True):
                    p.copy_((p + 2 / steps * r * g.sign()).clamp(c - r, c + r))
            highest = max(highest, mean_loss(loss, batches).item())
    return 100 * (highest - at_rest) / (1 + at_rest)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def split_like(vector: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    parts = vector.split([t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]
