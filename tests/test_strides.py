"""ResNets that stride in a 1x1 convolution, and weight files that are not taken for those of the other kind."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from models import build_segmenter
from models.norm import LEAKY_SLOPE
from models.pretrained import load_backbone_weights

DEPTHS = (3, 4, 6, 3)


def plain_resnet(state, x, stride_in_1x1):
    """ResNet-50 as it reads in a paper, without dilation, with plain batch norms: what each stage gives."""

    def conv(x, name, stride=1):
        weight = state[f"{name}.weight"]
        return F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)

    def norm(x, name):
        mean, var, weight, bias = (
            state[f"{name}.{part}"].view(-1, 1, 1)
            for part in ("running_mean", "running_var", "weight", "bias")
        )
        return (x - mean) / torch.sqrt(var + 1e-5) * weight + bias

    def activate(x):
        return F.leaky_relu(x, LEAKY_SLOPE)

    x = F.max_pool2d(activate(norm(conv(x, "conv1", 2), "bn1")), 3, 2, 1)
    for stage, depth in enumerate(DEPTHS, start=1):
        for number in range(depth):
            name = f"layer{stage}.{number}"
            stride = 2 if stage > 1 and number == 0 else 1
            first, second = (stride, 1) if stride_in_1x1 else (1, stride)
            out = activate(norm(conv(x, f"{name}.conv1", first), f"{name}.bn1"))
            out = activate(norm(conv(out, f"{name}.conv2", second), f"{name}.bn2"))
            out = norm(conv(out, f"{name}.conv3"), f"{name}.bn3")
            if number == 0:
                x = norm(conv(x, f"{name}.downsample.0", stride), f"{name}.downsample.1")
            x = activate(out + x)
        yield x


def unpacked(shared):
    """The packed weights as float32: int8 and one scale per output channel."""
    packed = np.load(shared / "weights" / "resnet50_v1_int8.npz")
    state = {}
    for key in packed.files:
        if key.endswith(":q"):
            scale = packed[f"{key[:-2]}:s"][:, None, None, None]
            state[key[:-2]] = torch.from_numpy(packed[key].astype(np.float32) * scale)
        elif not key.endswith(":s"):
            state[key] = torch.from_numpy(packed[key])
    return state


@pytest.fixture(scope="module")
def published(shared, tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "resnet50_v1.pth"
    torch.save(unpacked(shared), path)
    return path


@pytest.mark.parametrize("output_stride", [16, 8])
def test_published_weights_give_the_features_of_the_plain_network(shared, published, output_stride):
    """Every n-th place of a dilated map is the place of the map with strides."""
    from data.images import read_image
    from data.transforms import normalise

    image = read_image(sorted((shared / "voc2012_192" / "JPEGImages").glob("*.jpg"))[0])
    x = normalise(torch.from_numpy(image).permute(2, 0, 1)[None])[..., :129, :161]
    segmenter = build_segmenter("resnet50_v1", output_stride=output_stride, head_channels=8).eval()
    load_backbone_weights(segmenter, published)
    state = torch.load(published, weights_only=True)
    with torch.no_grad():
        ours = list(segmenter.body.stages(x))
        expected, others = (list(plain_resnet(state, x, stride_in_1x1)) for stride_in_1x1 in (True, False))
    for stage, (mine, wanted) in enumerate(zip(ours, expected, strict=True)):
        step = max(1, (4 << stage) // output_stride)
        assert mine.shape[-2:] == tuple(
            math.ceil(side / min(4 << stage, output_stride)) for side in x.shape[-2:]
        )
        assert (mine[..., ::step, ::step] - wanted).abs().max() < 1e-4 * wanted.abs().max()
    assert (others[-1] - expected[-1]).abs().max() > 0.1 * expected[-1].abs().max()  # the stride matters
