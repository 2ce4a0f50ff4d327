"""Enlargement by matrix products against F.interpolate, and logits that are enlarged when somebody asks."""

import pytest
import torch
from torch.nn import functional as F

from models.upsample import Enlarged, enlarge, interpolation

SIZES = [
    (1, 1, 5, 3),
    (8, 8, 128, 128),
    (4, 7, 61, 97),
    (5, 5, 5, 5),
    (9, 13, 4, 3),
    (3, 2, 3, 40),
    (33, 1, 512, 2),
]


@pytest.mark.parametrize("height,width,new_height,new_width", SIZES)
def test_enlarging_is_bilinear_interpolation(height, width, new_height, new_width):
    x = torch.randn(2, 3, height, width, dtype=torch.float64, requires_grad=True)
    size = (new_height, new_width)
    ours, theirs = enlarge(x, size), F.interpolate(x, size=size, mode="bilinear", align_corners=False)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(theirs)
    gradients = [torch.autograd.grad((y * weights).sum(), x)[0] for y in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    single = enlarge(x.detach().float(), size)
    torch.testing.assert_close(single, theirs.float(), rtol=0, atol=1e-5)
    assert single.is_contiguous()


def test_training_can_follow_an_evaluation():
    """A matrix made in inference mode could not be kept for a backward pass."""
    interpolation.cache_clear()
    with torch.inference_mode():
        enlarge(torch.randn(1, 1, 3, 3), (7, 7))
    x = torch.randn(1, 1, 3, 3, requires_grad=True)
    enlarge(x, (7, 7)).sum().backward()
    torch.testing.assert_close(x.grad.sum(), torch.tensor(49.0))


def test_enlarging_keeps_its_precision_under_autocast():
    x = torch.randn(1, 2, 4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(enlarge(x, (9, 9)), enlarge(x.clone(), (9, 9)))
        assert enlarge(x, (9, 9)).dtype == torch.float32


def test_late_logits_behave_like_their_tensor():
    small = torch.randn(2, 4, 3, 3, dtype=torch.float64, requires_grad=True)
    late, whole = Enlarged(small, (8, 6)), enlarge(small, (8, 6))
    assert late.shape == whole.shape and len(late) == 2
    for use in (
        lambda z: z.softmax(dim=1),
        lambda z: z[:, 1:],
        lambda z: 2 * z - z / 3,
        lambda z: whole.detach() * z,
        lambda z: torch.cat((z, whole), dim=1),
        lambda z: F.log_softmax(z, dim=1),
        lambda z: (z > 0).double(),
        lambda z: -z + 1,
    ):
        assert torch.equal(use(late), use(whole))
    torch.autograd.grad(late.square().sum(), small)
