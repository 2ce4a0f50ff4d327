"""Bodies, head and segmenter: sizes, names, strides, what new classes change and what they leave alone."""

import copy
import math

import pytest
import torch
from conftest import mostly_slow
from torch import nn
from torch.nn import functional as F

from data.vision import torchvision
from models import BACKBONES, build_segmenter
from models.deeplabv3 import DeepLabV3
from models.mobilenet import DilatedDepthwise
from models.norm import NORMS, make_norm
from models.segmenter import Pointwise, use_pointwise

SMALL = ("resnet_tiny", "mobilenet_v2")


def small_segmenter(*num_classes, body="resnet_tiny", seed=0, **options):
    torch.manual_seed(seed)
    options = {"output_stride": 8, "head_channels": 8, "dilations": (1, 2, 3), **options}
    segmenter = build_segmenter(body, **options)
    for num in num_classes:
        segmenter.add_classes(num)
    return segmenter


def num_parameters(module):
    return sum(parameter.numel() for parameter in module.parameters())


# ---- backbones ---------------------------------------------------------------------------------------------


def test_published_sizes():
    with torch.device("meta"):
        segmenter = build_segmenter("resnet101")
    assert num_parameters(segmenter.body) == 42_500_160
    assert num_parameters(segmenter.head) == 15_535_104
    with torch.device("meta"):
        assert 300_000 < num_parameters(build_segmenter("resnet_tiny").body) < 500_000


@pytest.mark.parametrize(
    "name",
    mostly_slow([name for name in BACKBONES if name != "resnet_tiny"], fast=["resnet18", "mobilenet_v2"]),
)
def test_parameters_are_named_as_in_torchvision(name):
    with torch.device("meta"):
        ours = build_segmenter(name).body.state_dict()
        theirs = torchvision.models.get_model(name.removesuffix("_v1").removesuffix("_relu")).state_dict()
    left_out = ("fc.", "classifier.", "features.18.")
    theirs = {
        key: tensor.shape
        for key, tensor in theirs.items()
        if not key.startswith(left_out) and not key.endswith("num_batches_tracked")
    }
    assert {
        key: tensor.shape for key, tensor in ours.items() if not key.endswith("num_batches_tracked")
    } == theirs


@pytest.mark.parametrize("output_stride", [8, 16])
def test_the_pooling_window_may_be_given_and_is_512_pixels_otherwise(output_stride):
    sizes = [
        small_segmenter(output_stride=output_stride, pooling=pooling).head.pooling_size
        for pooling in (None, 5)
    ]
    assert sizes == [512 // output_stride, 5]


@pytest.mark.parametrize("body", ["resnet50", "resnet50_v1"])
@pytest.mark.parametrize(("output_stride", "dilations"), [(16, [1, 1, 1, 2]), (8, [1, 1, 2, 4])])
def test_resnet_dilates_instead_of_striding(body, output_stride, dilations):
    with torch.device("meta"):
        network = build_segmenter(body, output_stride=output_stride).body
    for stage, dilation in enumerate(dilations, start=1):
        for number, block in enumerate(getattr(network, f"layer{stage}")):
            stride = 2 if stage > 1 and number == 0 and dilation == 1 else 1
            assert block.conv2.dilation == (dilation, dilation)
            strides = [conv.stride[0] for conv in (block.conv1, block.conv2, block.conv3)]
            assert strides == ([stride, 1, 1] if body.endswith("_v1") else [1, stride, 1])


@pytest.mark.parametrize("size", [(8, 8), (9, 7), (1, 3)])
@pytest.mark.parametrize("dilation", [2, 4])
def test_depthwise_over_interleaved_grids_is_the_dilated_one(size, dilation):
    plain = torch.nn.Conv2d(6, 6, 3, padding=dilation, dilation=dilation, groups=6, bias=False).double()
    fast = DilatedDepthwise(plain, dilation)
    x = torch.randn(2, 6, *size, dtype=torch.double, requires_grad=True)
    assert fast.weight is plain.weight
    assert fast(x).shape == plain(x).shape
    weight = torch.randn_like(x)
    expected = torch.autograd.grad((plain(x) * weight).sum(), (x, plain.weight))
    got = torch.autograd.grad((fast(x) * weight).sum(), (x, plain.weight))
    for one, other in zip((plain(x), *expected), (fast(x), *got), strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


@pytest.mark.parametrize("output_stride", [8, 16])
def test_dilated_mobilenet_sees_the_places_the_strided_one_sees(output_stride):
    """Every n-th value of the dilated map is the map of the plain network."""
    norm = make_norm("abn")
    torch.manual_seed(0)
    plain = BACKBONES["mobilenet_v2"](output_stride=32, norm=norm).eval()
    dilated = BACKBONES["mobilenet_v2"](output_stride=output_stride, norm=norm).eval()
    dilated.load_state_dict(plain.state_dict())
    x = torch.randn(1, 3, 97, 97)
    step = 32 // output_stride
    with torch.no_grad():
        torch.testing.assert_close(dilated(x)[..., ::step, ::step], plain(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("body", mostly_slow([*SMALL, "resnet18", "resnet50"], fast=SMALL))
def test_every_parameter_learns(body, norm):
    if norm == "iabn":
        pytest.importorskip("inplace_abn", exc_type=ImportError)
    segmenter = small_segmenter(3, 2, body=body, norm=norm)
    output = segmenter(torch.randn(2, 3, 33, 33))
    (output.logits.square().mean() + output.features.square().mean()).backward()
    for name, parameter in segmenter.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("body", SMALL)
@pytest.mark.parametrize("lean", ["abn_lean", "iabn"])
def test_all_norms_make_one_network(lean, body, training):
    if lean == "iabn":
        pytest.importorskip("inplace_abn", exc_type=ImportError)
    pure, inplace = (small_segmenter(3, body=body, norm=norm).train(training) for norm in ("abn", lean))
    inplace.load_state_dict(pure.state_dict())
    pure.load_state_dict(inplace.state_dict())
    x = torch.randn(3, 3, 32, 32)
    outputs = []
    for segmenter in (pure, inplace):
        output = segmenter(x.clone())
        output.logits.square().mean().backward()
        outputs.append(output)
    torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(dict(inplace.state_dict()), dict(pure.state_dict()), rtol=1e-3, atol=1e-4)
    for one, other in zip(pure.head.parameters(), inplace.head.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=2e-2, atol=1e-4)


def test_tiny_network_fits_one_image():
    segmenter = small_segmenter(3, head_channels=16)
    x = torch.randn(2, 3, 32, 32)
    labels = (x.mean(1) > 0).long() + torch.arange(2).view(2, 1, 1)
    labels[:, :16] = 0
    optimizer = torch.optim.SGD(segmenter.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(15):
        loss = F.cross_entropy(segmenter(x).logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


# ---- head --------------------------------------------------------------------------------------------------


def head(**options):
    torch.manual_seed(0)
    return DeepLabV3(4, 6, norm=make_norm("abn"), dilations=(1, 2, 3), **options).double().eval()


def window_mean(x, size):
    """The pooling window by its definition: clamped centre, so that the window lies inside the map."""
    height, width = x.shape[-2:]
    rows, columns = min(size, height), min(size, width)
    pooled = torch.empty_like(x)
    for row in range(height):
        for column in range(width):
            top = min(max(row - (rows - 1) // 2, 0), height - rows)
            left = min(max(column - (columns - 1) // 2, 0), width - columns)
            pooled[..., row, column] = x[..., top : top + rows, left : left + columns].mean((2, 3))
    return pooled


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7])
def test_pooling_window_in_eval(size):
    x = torch.randn(2, 4, 5, 7, dtype=torch.float64)
    expected = window_mean(x, size)
    torch.testing.assert_close(head(pooling_size=size)._pool(x).expand_as(x), expected)


def test_pooling_is_global_in_training_and_without_a_window():
    x = torch.randn(2, 4, 5, 7, dtype=torch.float64)
    mean = x.mean((2, 3), keepdim=True)
    torch.testing.assert_close(head(pooling_size=None)._pool(x), mean)
    torch.testing.assert_close(head(pooling_size=2).train()._pool(x), mean)


def test_window_of_the_published_crop_is_global():
    with torch.device("meta"):
        for stride in (8, 16):
            assert build_segmenter("resnet18", output_stride=stride).head.pooling_size == 512 // stride


def test_head_adds_the_image_branch():
    network, x = head(pooling_size=None), torch.randn(2, 4, 5, 7, dtype=torch.float64)
    maps = network.map_bn(torch.cat([conv(x) for conv in network.map_convs], dim=1))
    image = network.global_pooling_bn(network.global_pooling_conv(x.mean((2, 3), keepdim=True)))
    expected = network.red_bn(network.red_conv(maps) + network.pool_red_conv(image).expand(2, 6, 5, 7))
    torch.testing.assert_close(network(x), expected)
    assert [conv.dilation[0] for conv in network.map_convs] == [1, 1, 2, 3]


def test_head_starts_xavier_normal():
    torch.manual_seed(0)
    conv = DeepLabV3(256, 64, norm=make_norm("abn")).map_convs[1]
    gain = math.sqrt(2 / (1 + 0.01**2))
    assert conv.weight.std().item() == pytest.approx(gain * math.sqrt(2 / (9 * (256 + 64))), rel=0.01)


# ---- classes -----------------------------------------------------------------------------------------------


def test_logits_stand_in_the_order_of_the_steps():
    segmenter = small_segmenter(3, 1, 2).double().eval()
    assert segmenter.num_classes == 6
    for start, classifier in zip((0, 3, 4), segmenter.classifiers, strict=True):
        nn.init.zeros_(classifier.weight)
        classifier.bias.data = torch.arange(start, start + classifier.out_channels, dtype=torch.float64)
    logits = segmenter(torch.randn(1, 3, 16, 16, dtype=torch.float64)).logits
    torch.testing.assert_close(logits, torch.arange(6.0).double().view(1, 6, 1, 1).expand_as(logits))


def test_new_classifier_has_dtype_and_device_of_the_network():
    segmenter = small_segmenter(3).to("meta", torch.bfloat16)
    segmenter.add_classes(2)
    assert segmenter.classifiers[1].weight.device.type == "meta"
    assert segmenter.classifiers[1].bias.dtype == torch.bfloat16


def test_new_classes_leave_old_logits_unchanged():
    segmenter, x = small_segmenter(3).eval(), torch.randn(1, 3, 16, 16)
    before = segmenter(x).logits
    segmenter.add_classes(2)
    torch.testing.assert_close(segmenter(x).logits[:, :3], before)


def test_background_initialisation_shares_the_background_equally():
    segmenter, x = small_segmenter(3, 2).double().eval(), torch.randn(1, 3, 16, 16, dtype=torch.float64)
    before = segmenter(x).logits.softmax(1)
    segmenter.add_classes(4)
    segmenter.init_new_from_background()
    after = segmenter(x).logits.softmax(1)
    torch.testing.assert_close(after[:, 1:5], before[:, 1:])
    for channel in (0, 5, 6, 7, 8):
        torch.testing.assert_close(after[:, channel], before[:, 0] / 5)


def test_background_initialisation_leaves_the_first_step_alone():
    segmenter = small_segmenter(3)
    before = {name: tensor.clone() for name, tensor in segmenter.state_dict().items()}
    segmenter.init_new_from_background()
    torch.testing.assert_close(dict(segmenter.state_dict()), before, rtol=0, atol=0)


def test_upsampling_is_bilinear_without_aligned_corners():
    segmenter, x = small_segmenter(3).eval(), torch.randn(1, 3, 24, 40)
    hidden = segmenter.head(segmenter.body(x))
    expected = F.interpolate(segmenter.classifiers[0](hidden), (24, 40), mode="bilinear", align_corners=False)
    torch.testing.assert_close(segmenter(x).logits, expected)


def test_logits_are_full_precision_under_autocast():
    segmenter = small_segmenter(3)
    with torch.autocast("cpu", torch.bfloat16):
        assert segmenter(torch.randn(2, 3, 16, 16)).logits.dtype == torch.float32


class Uncopyable:
    """As a process group: neither copied nor pickled."""

    def __deepcopy__(self, memo):
        raise TypeError("cannot be copied")

    __reduce_ex__ = __deepcopy__


def test_frozen_copy_is_a_teacher():
    segmenter, x = small_segmenter(3), torch.randn(2, 3, 16, 16)
    group = Uncopyable()
    norms = [module for module in segmenter.modules() if hasattr(module, "group")]
    for norm in norms:
        norm.group = group
    teacher = segmenter.frozen_copy()
    assert not teacher.training and segmenter.training
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert all(parameter.requires_grad for parameter in segmenter.parameters())
    assert all(norm.group is group for norm in norms)
    assert all(getattr(module, "group", None) is None for module in teacher.modules())

    before = teacher(x).logits
    torch.testing.assert_close(segmenter.eval()(x).logits, before)
    with torch.no_grad():
        for tensor in segmenter.state_dict().values():
            tensor.add_(1.0)
    torch.testing.assert_close(teacher(x).logits, before, rtol=0, atol=0)


def test_refused_settings_name_the_choices():
    with pytest.raises(ValueError, match=r"mobilenet_v2.*resnet101"):
        build_segmenter("vgg")
    with pytest.raises(ValueError, match="8 or 16"):
        build_segmenter("resnet18", output_stride=4)
    with pytest.raises(ValueError, match="at least one class"):
        small_segmenter(0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_a_pointwise_convolution_is_a_convolution(dtype, tolerance, bias):
    conv = nn.Conv2d(5, 7, 1, bias=bias, dtype=dtype)
    ours = nn.Sequential(copy.deepcopy(conv))
    use_pointwise(ours)
    assert isinstance(ours[0], Pointwise) and type(conv) is nn.Conv2d
    for layout in (torch.channels_last, torch.contiguous_format):
        ours.to(memory_format=layout)
        x = torch.randn(2, 5, 4, 3, dtype=dtype).contiguous(memory_format=layout).requires_grad_()
        one, other = ours(x), conv(x)
        assert one.is_contiguous(memory_format=layout)
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
        weights = torch.randn_like(one)
        gradients = [
            torch.autograd.grad((y * weights).sum(), [x, *network.parameters()])
            for y, network in ((one, ours), (other, conv))
        ]
        torch.testing.assert_close(*gradients, rtol=tolerance, atol=tolerance)
        weight, gradient = next(ours.parameters()), gradients[0][1]
        assert gradient.stride() == weight.stride()  # as DDP wants it


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_a_pointwise_convolution_is_by_onednn_with_one_thread_too(monkeypatch):
    chosen = []
    convolve = F.conv2d

    def watched(x, weight, bias, dilation):
        sizes = [1, 1], [0, 0], [dilation, dilation], False, [0, 0], 1
        chosen.append(torch._C._select_conv_backend(x, weight, bias, *sizes))
        return convolve(x, weight, bias, dilation=dilation)

    conv = nn.Sequential(nn.Conv2d(5, 7, 1)).to(memory_format=torch.channels_last)
    use_pointwise(conv)
    monkeypatch.setattr("models.segmenter.F.conv2d", watched)
    with torch.no_grad():
        conv(torch.randn(2, 5, 4, 3).contiguous(memory_format=torch.channels_last))
    assert chosen == [torch._C._ConvBackend.Mkldnn] and torch.get_num_threads() == 1


def test_other_convolutions_stay():
    others = nn.Sequential(
        nn.Conv2d(4, 4, 1, stride=2),
        nn.Conv2d(4, 4, 3),
        nn.Conv2d(4, 4, 1, groups=2),
        nn.Conv2d(4, 4, 1, padding=1),
    )
    use_pointwise(others)
    assert all(type(conv) is nn.Conv2d for conv in others)
