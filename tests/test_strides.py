"""ResNets that stride in a 1x1 convolution, and weight files that are not taken for the other kind."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from data.vision import torchvision
from models import build_segmenter
from models.norm import LEAKY_SLOPE
from models.pretrained import WeightsError, load_backbone_weights
from models.strides import MARK

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


# ---- which kind a file is of -------------------------------------------------------------------------------


def bottlenecks(body):
    torch.manual_seed(0)
    return build_segmenter(body, head_channels=8)


def torchvision_state():
    torch.manual_seed(1)
    return torchvision.models.resnet50().state_dict()


def other_of(body):
    return "resnet50" if body == "resnet50_v1" else "resnet50_v1"


def test_published_weights_are_known_by_content_whatever_their_name(published, tmp_path):
    path = tmp_path / "resnet50.pth"
    torch.save({"state_dict": torch.load(published, weights_only=True)}, path)
    with pytest.raises(
        WeightsError, match=r"strides in the first 1x1 convolution.*set model.body=resnet50_v1"
    ):
        load_backbone_weights(bottlenecks("resnet50"), path)
    assert not load_backbone_weights(bottlenecks("resnet50_v1"), path).note
    pytest.importorskip("timm")
    with pytest.raises(WeightsError, match=r"set model.body=resnet50_v1"):
        load_backbone_weights(bottlenecks("timm/resnet50"), path)


@pytest.mark.parametrize("body", ["resnet50", "resnet50_v1"])
def test_a_file_may_say_it_itself(tmp_path, body):
    path = tmp_path / "mine.pth"
    torch.save({"state_dict": torchvision_state(), MARK: body == "resnet50_v1"}, path)
    assert not load_backbone_weights(bottlenecks(body), path).note
    with pytest.raises(WeightsError, match=f"names and shapes fit.*set model.body={body}$"):
        load_backbone_weights(bottlenecks(other_of(body)), path)


@pytest.mark.parametrize("body", ["resnet50", "resnet50_v1"])
def test_of_other_files_nothing_is_known_and_that_is_said(tmp_path, body):
    torch.save(torchvision_state(), tmp_path / "mine.pth")
    note = load_backbone_weights(bottlenecks(body), tmp_path / "mine.pth").note
    assert f"mine.pth does not tell which convolution of its blocks strides; it is taken as {body}" in note
    assert f"use model.body={other_of(body)}" in note


def test_files_of_torchvision_are_known_by_their_hash(tmp_path, monkeypatch):
    path = tmp_path / "renamed.pth"
    torch.save(torchvision_state(), path)
    published = torchvision.models.get_model_weights("resnet50")["IMAGENET1K_V1"].url
    monkeypatch.setattr("models.pretrained.sha256_of", lambda path: published[-12:-4] + "0" * 56)
    assert not load_backbone_weights(bottlenecks("resnet50"), path).note
    with pytest.raises(WeightsError, match="in the 3x3 convolution, resnet50_v1"):
        load_backbone_weights(bottlenecks("resnet50_v1"), path)


def test_files_of_inplace_abn_stride_in_3x3(tmp_path):
    from test_pretrained import write_iabn

    write_iabn(tmp_path / "file.pth.tar", bottlenecks("resnet50"))
    assert not load_backbone_weights(bottlenecks("resnet50"), tmp_path / "file.pth.tar").note
    with pytest.raises(WeightsError, match=r"set model.body=resnet50$"):
        load_backbone_weights(bottlenecks("resnet50_v1"), tmp_path / "file.pth.tar")


def test_blocks_without_a_1x1_convolution_have_one_kind(tmp_path):
    torch.save(torchvision.models.resnet18().state_dict(), tmp_path / "file.pth")
    assert not load_backbone_weights(bottlenecks("resnet18"), tmp_path / "file.pth").note


def test_no_download_is_offered_for_the_other_kind():
    with pytest.raises(WeightsError, match="no ImageNet weights exist for resnet50_v1"):
        load_backbone_weights(bottlenecks("resnet50_v1"), "imagenet")
