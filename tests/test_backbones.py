"""The contract of models/backbone.py, to which every registered backbone and some of timm are held."""

import copy
import math
from functools import cache

import pytest
import torch
from conftest import mostly_slow
from torch.nn import functional as F

from models import BACKBONES, build_segmenter
from models.backbone import IMAGENET, Backbone, Colours, colours_of

OF_TIMM = ("timm/test_resnet", "timm/test_convnext", "timm/test_vit", "timm/swin_tiny_patch4_window7_224")
FAST = ("resnet_tiny", "mobilenet_v2", "timm/test_resnet", "timm/test_vit")
EVERY = pytest.mark.parametrize("name", mostly_slow([*BACKBONES, *OF_TIMM], fast=FAST))
SIZE = 40, 56  # not whole cells of every network


def built(name, output_stride=8):
    if name.startswith("timm/"):
        pytest.importorskip("timm")
    torch.manual_seed(0)
    segmenter = build_segmenter(name, output_stride=output_stride, head_channels=4, dilations=(1, 2, 3))
    segmenter.add_classes(3)
    return segmenter


@cache
def network(name):
    """A network that no test changes, with statistics and weights as if trained."""
    segmenter = built(name)
    generator = torch.Generator().manual_seed(1)
    for norm in segmenter.norms():
        norm.running_mean.copy_(torch.rand(norm.running_mean.shape, generator=generator) - 0.5)
        for tensor in (norm.running_var, norm.weight.data):  # timm's ResNets start with weights of zero
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return segmenter.eval()


def images(batch=2, size=SIZE):
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(2))


@EVERY
@pytest.mark.parametrize("output_stride", [8, 16])
def test_stages_have_their_channels_and_the_last_the_output_stride(name, output_stride):
    with torch.device("meta"):
        body = built(name, output_stride).body.eval()
        stages = list(body.stages(torch.empty(1, 3, 65, 97)))
    assert isinstance(body, Backbone)
    assert tuple(stage.shape[1] for stage in stages) == body.channels
    assert body.out_channels == body.channels[-1]
    assert stages[-1].shape[-2:] == tuple(math.ceil(side / output_stride) for side in (65, 97))
    sizes = [stage.shape[-1] for stage in stages[:-1]]
    assert sizes == sorted(sizes, reverse=True)


@EVERY
def test_the_activation_gives_a_stage_back(name):
    body = network(name).body
    with torch.no_grad():
        for stage in body.stages(images()):
            before = body.before_activation(stage)
            again = F.leaky_relu(before, body.slope) if body.slope != 1 else before
            torch.testing.assert_close(again, stage)
            assert body.slope == 1 or (before < stage).any()


@EVERY
def test_every_parameter_of_a_backbone_gets_a_gradient(name):
    body = copy.deepcopy(network(name)).train().body
    x = images().requires_grad_()
    stages = list(body.stages(x))
    sum((stage * torch.randn_like(stage)).mean() for stage in stages).backward()
    assert x.grad.any()
    dead = [key for key, p in body.named_parameters() if p.grad is None or not p.grad.any()]
    assert not dead
    assert all(p.grad.isfinite().all() for p in body.parameters())


@EVERY
def test_a_state_dict_is_the_whole_state(name):
    other = copy.deepcopy(network(name))
    for tensor in other.state_dict().values():
        tensor.zero_()
    other.load_state_dict(network(name).state_dict())
    with torch.no_grad():
        expected, actual = (model(images()).logits for model in (network(name), other))
    assert torch.equal(actual, expected)


@EVERY
def test_in_eval_an_image_gives_the_same_features_whatever_is_beside_it(name):
    body, x = network(name).body, images(3)
    with torch.no_grad():
        first, again, alone = body(x), body(x), body(x[:1])
    assert torch.equal(first, again)
    torch.testing.assert_close(alone, first[:1], rtol=1e-4, atol=1e-4 * first.abs().max().item())


@EVERY
def test_channels_last_is_the_same_network(name):
    model = network(name)
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)
    with torch.no_grad():
        expected = model(images()).logits
        actual = last(images().to(memory_format=torch.channels_last)).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


@EVERY
def test_frozen_norms_stay_in_training(name):
    model = copy.deepcopy(network(name))
    model.freeze(model.body)
    before = {key: tensor.clone() for key, tensor in model.body.state_dict().items()}
    model.train()
    features = model(images()).features
    torch.testing.assert_close(dict(model.body.state_dict()), before, rtol=0, atol=0)
    assert not features.requires_grad
    with torch.no_grad():
        assert torch.equal(features, network(name)(images()).features)


@EVERY
def test_a_teacher_says_what_the_network_says(name):
    teacher = network(name).teacher()
    with torch.no_grad():
        expected, actual = network(name)(images()).logits, teacher(images()).logits
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())


@EVERY
def test_colours_are_of_all_three_channels(name):
    if name.startswith("timm/"):
        pytest.importorskip("timm")
    mean, std = colours_of(name)
    assert len(mean) == len(std) == 3 and all(0 < value < 1 for value in (*mean, *std))


def test_a_registered_function_may_say_its_colours(monkeypatch):
    def grey(*, output_stride, norm):
        return BACKBONES["resnet_tiny"](output_stride=output_stride, norm=norm)

    grey.colours = Colours((0.5, 0.5, 0.5), (1.0, 1.0, 1.0))
    monkeypatch.setitem(BACKBONES, "grey", grey)
    assert colours_of("grey") == built("grey").colours == grey.colours != IMAGENET


def test_the_colours_of_imagenet_are_those_that_images_are_normalised_by():
    from data.transforms import MEAN, STD

    assert Colours(MEAN, STD) == IMAGENET == colours_of("resnet101")
