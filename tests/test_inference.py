"""Scores of images of any size: padding, windows, flips and scales against direct computations."""

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.inference import STRIDE, _starts, predict
from models import Output, build_segmenter


@pytest.fixture(scope="module")
def network() -> nn.Module:
    """A real network, so that neighbours, padding and the head's pooling all matter."""
    torch.manual_seed(0)
    model = build_segmenter("resnet_tiny", output_stride=16, head_channels=8, dilations=(1, 2, 3))
    model.add_classes(3)
    model.add_classes(1)
    return model.eval()


class Pointwise(nn.Module):
    """Logits of a pixel depend on that pixel alone: no tiling may change them.

    Remembers what it was shown.
    """

    def __init__(self):
        super().__init__()
        self.shown: list[Tensor] = []
        self.rule = None

    def forward(self, images: Tensor) -> Output:
        self.shown.append(images)
        red, green, blue = images.unbind(1)
        return Output(torch.stack([red, 2 * green, red * blue, -blue], dim=1), images)


def random_images(height: int, width: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(height + width))


@torch.inference_mode()
def logits_of(network: nn.Module, images: Tensor) -> Tensor:
    return network(images).logits


# ---- whole images ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(16, 16), (32, 48), (64, 16)])
def test_sizes_that_fit_are_not_padded(size, network):
    images = random_images(*size)
    assert torch.equal(predict(network, images), logits_of(network, images))


@pytest.mark.parametrize("size", [(1, 1), (1, 37), (15, 17), (33, 31), (47, 2)])
def test_other_sizes_are_padded_with_the_mean_colour_and_cut_back(size, network):
    images = random_images(*size)
    height, width = (-(-side // STRIDE) * STRIDE for side in size)
    padded = torch.zeros(2, 3, height, width)
    padded[..., : size[0], : size[1]] = images
    found = predict(network, images)
    assert found.shape == (2, 4, *size)
    assert torch.equal(found, logits_of(network, padded)[..., : size[0], : size[1]])


@pytest.mark.parametrize("size", [(1, 1), (3, 7), (17, 33)])
@pytest.mark.parametrize("options", [{"window": 16}, {"scales": (0.5, 1.0, 1.75)}, {"flip": True}])
def test_every_way_of_scoring_takes_any_size(options, size, network):
    scores = predict(network, random_images(*size), **options)
    assert scores.shape == (2, 4, *size) and scores.isfinite().all()


def test_no_gradients_are_kept(network):
    assert not predict(network, random_images(16, 16)).requires_grad


# ---- sliding windows ---------------------------------------------------------------------------------------


def test_a_window_of_the_size_of_the_image_is_the_whole_image(network):
    images = random_images(32, 32)
    torch.testing.assert_close(predict(network, images, window=32), predict(network, images))


def test_a_window_larger_than_the_image_is_one_padded_pass(network):
    images = random_images(20, 30)
    padded = F.pad(images, (0, 64 - 30, 0, 64 - 20))
    expected = logits_of(network, padded)[..., :20, :30]
    torch.testing.assert_close(predict(network, images, window=64), expected)


@pytest.mark.parametrize("size", [(8, 8), (9, 23), (40, 17), (5, 50)])
@pytest.mark.parametrize("window", [1, 7, 16])
def test_windows_put_every_pixel_back_where_it_was(window, size):
    model, images = Pointwise(), random_images(*size)
    found = predict(model, images, window=window)
    torch.testing.assert_close(found, model(images).logits)


def test_logits_of_overlapping_windows_are_averaged(network):
    images = random_images(16, 40)
    total, hits = torch.zeros(2, 4, 16, 40), torch.zeros(40)
    for left in (0, 8, 16, 24):
        total[..., left : left + 16] += logits_of(network, images[..., left : left + 16])
        hits[left : left + 16] += 1
    torch.testing.assert_close(predict(network, images, window=16), total / hits)


def test_no_window_is_larger_than_asked():
    model = Pointwise()
    predict(model, random_images(50, 70), window=32)
    assert {tuple(shown.shape[-2:]) for shown in model.shown} == {(32, 32)}


@pytest.mark.parametrize("window", [1, 2, 3, 7, 16, 33])
def test_starts_cover_everything_and_stay_inside(window):
    for length in range(window, 3 * window + 20):
        starts = _starts(length, window)
        covered = {pixel for start in starts for pixel in range(start, start + window)}
        assert covered == set(range(length))
        assert starts == sorted(set(starts))
        overlap = [b - a for a, b in itertools.pairwise(starts)]
        assert all(step <= max(1, window // 2) for step in overlap)


def test_starts_by_hand():
    assert _starts(16, 16) == [0]
    assert _starts(17, 16) == [0, 1]
    assert _starts(32, 16) == [0, 8, 16]
    assert _starts(35, 16) == [0, 8, 16, 19]


# ---- flips and scales --------------------------------------------------------------------------------------


def test_one_scale_without_flip_gives_logits(network):
    images = random_images(16, 32)
    assert torch.equal(predict(network, images, scales=(1.0,)), logits_of(network, images))


def test_flip_averages_probabilities(network):
    images = random_images(32, 48)
    straight = logits_of(network, images).softmax(1)
    mirrored = logits_of(network, images.flip(-1)).flip(-1).softmax(1)
    found = predict(network, images, flip=True)
    torch.testing.assert_close(found, (straight + mirrored) / 2)
    torch.testing.assert_close(predict(network, images.flip(-1), flip=True).flip(-1), found)
    assert not torch.allclose(straight, mirrored, atol=1e-3)


@pytest.mark.parametrize("flip", [False, True])
def test_scales_average_probabilities_at_the_size_of_the_image(flip, network):
    images = random_images(32, 64)
    versions = []
    for scale in (0.5, 1.0, 2.0):
        size = (int(32 * scale), int(64 * scale))
        scaled = images if scale == 1 else F.interpolate(images, size, mode="bilinear", antialias=True)
        for mirror in (False, True) if flip else (False,):
            scores = logits_of(network, scaled.flip(-1)).flip(-1) if mirror else logits_of(network, scaled)
            versions.append(F.interpolate(scores, (32, 64), mode="bilinear").softmax(1))
    found = predict(network, images, scales=(0.5, 1.0, 2.0), flip=flip)
    torch.testing.assert_close(found, sum(versions) / len(versions))
    torch.testing.assert_close(found.sum(dim=1), torch.ones(2, 32, 64))


def test_a_single_other_scale_is_scaled(network):
    images = random_images(32, 32)
    scaled = F.interpolate(images, (16, 16), mode="bilinear", antialias=True)
    expected = F.interpolate(logits_of(network, scaled), (32, 32), mode="bilinear").softmax(1)
    torch.testing.assert_close(predict(network, images, scales=(0.5,)), expected)


def test_windows_flips_and_scales_combine():
    model, images = Pointwise(), random_images(16, 24)
    options = {"scales": (1.0, 1.5), "flip": True}
    torch.testing.assert_close(
        predict(model, images, window=16, **options), predict(model, images, **options)
    )
