"""The teacher, whose norms are folded into its convolutions, against the network it was made from."""

import pytest
import torch
from conftest import mostly_slow
from torch import nn

from models import BACKBONES, build_segmenter
from models.deeplabv3 import DeepLabV3
from models.norm import ABN, make_norm

NORMS = ["abn", "abn_lean", "iabn"]


def trained(body: str, norm: str = "abn", stride: int = 16):
    """A network whose norms have statistics, weights of either sign and biases."""
    torch.manual_seed(0)
    network = build_segmenter(body, norm=norm, output_stride=stride, head_channels=8)
    network.add_classes(3)
    network.add_classes(2)
    network.returns_stages = True
    unsettle(network)
    return network


def unsettle(network) -> None:
    for module in network.modules():
        if hasattr(module, "running_mean"):
            for tensor, low in ((module.weight, -1.5), (module.bias, -1.0), (module.running_mean, -1.0)):
                tensor.data.uniform_(low, 1.5)
            module.running_var.uniform_(0.5, 2.0)


def outputs(network, x):
    with torch.no_grad():
        output = network(x)
    return [output.logits, output.features, *output.stages]


@pytest.mark.parametrize("stride", [8, 16])
@pytest.mark.parametrize("body", mostly_slow(BACKBONES, fast=("resnet_tiny", "mobilenet_v2")))
def test_a_teacher_says_what_its_network_says(body, stride, double_precision):
    network, x = trained(body, stride=stride), torch.randn(2, 3, 48, 40)
    teacher = network.teacher()
    assert not any(hasattr(module, "running_mean") for module in teacher.modules())
    assert any(hasattr(module, "running_mean") for module in network.modules())  # which is left as it was
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    torch.testing.assert_close(outputs(teacher, x), outputs(network.frozen_copy(), x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("body", ["resnet_tiny", "mobilenet_v2"])
def test_a_teacher_says_the_same_with_channels_last_and_every_norm(body, norm):
    layout = torch.channels_last
    if norm == "iabn":
        pytest.importorskip("inplace_abn")
        layout = torch.contiguous_format  # its kernels do not take every channels-last tensor
    network = trained(body, norm).to(memory_format=layout)
    x = torch.randn(2, 3, 48, 40).contiguous(memory_format=layout)
    teacher = network.teacher().to(memory_format=layout)
    for ours, theirs in zip(outputs(teacher, x), outputs(network.frozen_copy(), x), strict=True):
        scale = theirs.abs().max()
        torch.testing.assert_close(ours / scale, theirs / scale, rtol=0, atol=2e-5)


class OtherBackbone(nn.Module):
    """Norms come before their convolutions, as names alone would not tell, or are torch's,
    which scale by the signed weight.
    """

    out_channels = 4

    def __init__(self):
        super().__init__()
        self.bn1, self.conv1 = ABN(3), nn.Conv2d(3, 3, 3, stride=8, padding=1)
        self.other = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
        self.ours = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), ABN(4))

    def stages(self, x):
        yield self.ours(self.other(self.conv1(self.bn1(x))))

    before_activation = staticmethod(torch.clone)


def test_only_norms_of_which_the_order_is_known_are_folded(double_precision):
    network = trained("resnet_tiny", stride=8)
    network.body = OtherBackbone()
    network.head = DeepLabV3(4, 8, norm=make_norm("abn"), dilations=(1, 2, 3))
    unsettle(network)
    teacher, x = network.teacher(), torch.randn(2, 3, 48, 40)
    left = [name for name, module in teacher.named_modules() if hasattr(module, "running_mean")]
    assert left == ["body.bn1", "body.other.1"]
    torch.testing.assert_close(outputs(teacher, x), outputs(network.frozen_copy(), x), rtol=1e-10, atol=1e-10)


def test_a_teacher_runs_in_half_precision():
    network = trained("resnet_tiny").to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 48, 40).contiguous(memory_format=torch.channels_last)
    teacher, exact = network.teacher(), outputs(network.frozen_copy(), x)
    with torch.autocast("cpu", torch.bfloat16):
        folded, before = outputs(teacher, x), outputs(network.frozen_copy(), x)
    assert folded[0].dtype == torch.float32
    for ours, theirs, wanted in zip(folded, before, exact, strict=True):
        error = (ours.float() - wanted).abs().mean()
        assert error <= 1.5 * (theirs.float() - wanted).abs().mean() + 1e-6
