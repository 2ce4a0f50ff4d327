"""Files written in each known format -> the same function in our network;
damaged or foreign files -> clear errors.
"""

import os
import pickle
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
from conftest import mostly_slow
from torch import nn
from torch.nn import functional as F

from data.vision import torchvision
from models import build_segmenter
from models.norm import ABN, LEAKY_SLOPE
from models.pretrained import WeightsError, import_mib_checkpoint, load_backbone_weights

SHARED = os.environ.get("ALTERSGD_SHARED")


def randomised(network, seed):
    """Weights, scales and statistics of both signs, as if trained."""
    generator = torch.Generator().manual_seed(seed)
    for module in network.modules():
        if hasattr(module, "running_mean"):
            for name in ("weight", "bias", "running_mean"):
                tensor = getattr(module, name).data
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            module.running_var.copy_(torch.rand(module.running_var.shape, generator=generator) + 0.5)
    return network


def small_segmenter(*num_classes, body="resnet18", seed=0, **options):
    torch.manual_seed(seed)
    segmenter = build_segmenter(body, head_channels=8, **options)
    for num in num_classes:
        segmenter.add_classes(num)
    return randomised(segmenter, seed)


def images():
    return torch.randn(2, 3, 33, 33, generator=torch.Generator().manual_seed(5))


def same_backbone(one, other):
    torch.testing.assert_close(dict(one.body.state_dict()), dict(other.body.state_dict()), rtol=0, atol=0)


# ---- torchvision -------------------------------------------------------------------------------------------


def theirs(name):
    """torchvision's network at output stride 16 with our activation, and its backbone as a function."""
    torch.manual_seed(1)
    network = randomised(torchvision.models.get_model(name), seed=1)
    if name == "mobilenet_v2":
        for block in network.features[14:18]:
            depthwise = block.conv[1][0]
            if depthwise.stride == (2, 2):
                depthwise.stride = (1, 1)
            else:
                depthwise.dilation = depthwise.padding = (2, 2)
        return network, lambda x: network.features[:18](x)

    for module in network.modules():
        if hasattr(module, "relu"):
            module.relu = nn.LeakyReLU(0.01)
    for block in network.layer4:
        for conv in block.modules():
            if isinstance(conv, nn.Conv2d):
                conv.stride = (1, 1)
                if conv.kernel_size == (3, 3):
                    conv.dilation = conv.padding = (2, 2)

    def body(x):
        x = network.maxpool(network.relu(network.bn1(network.conv1(x))))
        return network.layer4(network.layer3(network.layer2(network.layer1(x))))

    return network, body


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", mostly_slow(["resnet18", "resnet50", "mobilenet_v2"], fast=["resnet18"]))
def test_torchvision_file_gives_the_same_function(tmp_path, name, training):
    network, body = theirs(name)
    assert any(
        (module.weight < 0).any() for module in network.modules() if isinstance(module, nn.BatchNorm2d)
    )
    torch.save(network.state_dict(), tmp_path / "file.pth")
    segmenter = small_segmenter(body=name)
    report = load_backbone_weights(segmenter, tmp_path / "file.pth")
    assert report.format == "torchvision"
    assert all(key.startswith(("fc.", "classifier.", "features.18.")) for key in report.ignored)
    assert {"body." + key for key in segmenter.body.state_dict()} == set(report.matched)
    assert all(key.startswith("head.") for key in report.missing)
    network.double().train(training)
    segmenter.double().train(training)
    with torch.no_grad():
        expected = body(images().double())
        actual = segmenter.body(images().double())
    assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_scale_of_zero_keeps_a_gradient(tmp_path):
    network = torchvision.models.resnet18()
    network.layer1[0].bn2.weight.data[0] = 0.0
    torch.save(network.state_dict(), tmp_path / "file.pth")
    segmenter = small_segmenter(1)
    load_backbone_weights(segmenter, tmp_path / "file.pth")
    segmenter(images()).logits.square().sum().backward()
    norm = segmenter.body.layer1[0].bn2
    assert 0 < norm.weight[0].item() < 1e-30
    assert norm.weight.grad[0] != 0


@pytest.mark.skipif(SHARED is None, reason="ALTERSGD_SHARED names no folder with the published weight file")
@pytest.mark.slow
def test_published_mobilenet_file():
    path = Path(SHARED) / "weights" / "mobilenet_v2-b0353104.pth"
    segmenter = small_segmenter(body="mobilenet_v2").double()
    load_backbone_weights(segmenter, path)
    network, body = theirs("mobilenet_v2")
    network.load_state_dict(torch.load(path, weights_only=True))
    network.double().eval()
    segmenter.eval()
    with torch.no_grad():
        torch.testing.assert_close(
            segmenter.body(images().double()), body(images().double()), rtol=1e-4, atol=1e-4
        )


# ---- InPlaceABN and MiB ------------------------------------------------------------------------------------


def iabn_name(name):
    """layer1.0.conv1.weight -> mod2.block1.convs.conv1.weight"""
    parts = name.split(".")
    if not parts[0].startswith("layer"):
        return f"mod1.{name}"
    stage, block, *rest = parts
    prefix = f"mod{int(stage[-1]) + 1}.block{int(block) + 1}"
    if rest[0] == "downsample":
        return ".".join([prefix, {"0": "proj_conv", "1": "proj_bn"}[rest[1]], *rest[2:]])
    return ".".join([prefix, "convs", *rest])


def write_iabn(path, segmenter):
    state = {f"module.{iabn_name(name)}": tensor for name, tensor in segmenter.body.state_dict().items()}
    state["module.classifier.fc.weight"] = torch.zeros(1000, 512)
    state["module.classifier.fc.bias"] = torch.zeros(1000)
    torch.save(
        {"epoch": 89, "arch": "resnet", "state_dict": state}, path, _use_new_zipfile_serialization=False
    )
    return state


def write_mib(path, segmenter, **entries):
    state = {}
    for name, tensor in segmenter.state_dict().items():
        part, rest = name.split(".", 1)
        name = {"body": "body." + iabn_name(rest), "head": name, "classifiers": "cls." + rest}[part]
        state[f"module.{name}"] = tensor
    torch.save({"epoch": 29, "best_score": np.float64(0.7), "model_state": state, **entries}, path)


@pytest.mark.parametrize("body", ["resnet18", "resnet50"])
def test_iabn_names_are_those_of_its_authors(body):
    names = {iabn_name(name) for name in small_segmenter(body=body).body.state_dict()}
    expected = {
        "mod1.conv1.weight",
        "mod1.bn1.running_var",
        "mod2.block1.convs.conv1.weight",
        "mod5.block2.convs.bn2.bias",
    }
    assert expected | {"mod3.block1.proj_conv.weight", "mod3.block1.proj_bn.running_mean"} <= names


@pytest.mark.parametrize("body", mostly_slow(["resnet18", "resnet50"], fast=["resnet18"]))
def test_iabn_file(tmp_path, body):
    source, segmenter = small_segmenter(body=body, seed=1), small_segmenter(body=body, seed=2)
    write_iabn(tmp_path / "resnet_iabn_sync.pth.tar", source)
    report = load_backbone_weights(segmenter, str(tmp_path / "resnet_iabn_sync.pth.tar"))
    same_backbone(segmenter, source)
    assert report.format == "InPlaceABN"
    assert report.ignored == ["classifier.fc.weight", "classifier.fc.bias"]
    assert "2 ignored (classifier.fc.weight, classifier.fc.bias)" in str(report)


@pytest.mark.parametrize("present", [(), (16,), (16, 1, 1)])
def test_mib_checkpoint(tmp_path, present):
    source, segmenter = small_segmenter(16, 1, 1, seed=1).eval(), small_segmenter(*present, seed=2).eval()
    optimizer = torch.optim.SGD(source.parameters(), lr=0.1, momentum=0.9)
    write_mib(tmp_path / "15-5s_1.pth", source, optimizer_state=optimizer.state_dict(), trainer_state=None)
    report = import_mib_checkpoint(tmp_path / "15-5s_1.pth", segmenter)
    assert (report.ignored, report.missing) == ([], []) and len(report.matched) == len(source.state_dict())
    with torch.no_grad():
        expected, actual = source(images()), segmenter(images())
    assert segmenter.num_classes == 18
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


def signed_forward(self, x):
    """A norm of MiB's `--norm_act abn`: scaled by the weight itself, negative or not."""
    statistics = self.running_mean, self.running_var
    x = F.batch_norm(x, *statistics, self.weight, self.bias, self.training, self.momentum, self.eps)
    return F.leaky_relu(x, LEAKY_SLOPE) if self.activation == "leaky_relu" else x


@pytest.mark.parametrize("training", [False, True])
def test_a_mib_file_with_signed_norms_predicts_the_same(tmp_path, training, monkeypatch):
    source, segmenter = small_segmenter(4, 1, seed=1).double(), small_segmenter(seed=2).double()
    norms = [source.body.bn1, source.head.map_bn, source.head.global_pooling_bn, source.head.red_bn]
    assert all((norm.weight < 0).any() and (norm.weight > 0).any() for norm in norms)
    write_mib(tmp_path / "abn.pth", source)
    report = import_mib_checkpoint(tmp_path / "abn.pth", segmenter, signed_norms=True)
    assert not report.note
    source.train(training), segmenter.train(training)
    with torch.no_grad():
        actual = segmenter(images().double()).logits
        as_iabn = source(images().double()).logits
        monkeypatch.setattr(ABN, "forward", signed_forward)
        expected = source(images().double()).logits
    assert (as_iabn - expected).abs().max() > 0.1 * expected.abs().max()  # the sign matters
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9 * expected.abs().max().item())


def test_negative_norm_weights_of_a_mib_file_are_said(tmp_path):
    source = small_segmenter(3, seed=1)
    write_mib(tmp_path / "file.pth", source)
    for report in (
        import_mib_checkpoint(tmp_path / "file.pth", small_segmenter()),
        load_backbone_weights(small_segmenter(), tmp_path / "file.pth"),
    ):
        assert "norm weights are negative and taken as |weight| + eps" in str(report)
        assert "--norm-act abn" in str(report)
    for module in source.modules():
        if hasattr(module, "running_mean"):
            module.weight.data.abs_()
    write_mib(tmp_path / "file.pth", source)
    assert not import_mib_checkpoint(tmp_path / "file.pth", small_segmenter()).note


def test_backbone_of_a_mib_checkpoint(tmp_path):
    source, segmenter = small_segmenter(3, seed=1), small_segmenter(5, seed=2)
    write_mib(tmp_path / "file.pth", source)
    report = load_backbone_weights(segmenter, tmp_path / "file.pth")
    same_backbone(segmenter, source)
    assert "cls.0.weight" in report.ignored and "head.red_conv.weight" in report.ignored


# ---- refused -----------------------------------------------------------------------------------------------


def refused(match, source, body="resnet18", load=load_backbone_weights):
    segmenter = small_segmenter(3, body=body)
    before = {name: tensor.clone() for name, tensor in segmenter.state_dict().items()}
    with pytest.raises(WeightsError, match=match):
        load(segmenter, source)
    torch.testing.assert_close(
        dict(segmenter.state_dict()), before, rtol=0, atol=0
    )  # nothing was half loaded


def load_mib(segmenter, path):
    return import_mib_checkpoint(path, segmenter)


@pytest.mark.parametrize(
    "pair",
    mostly_slow(
        [
            ("resnet34", "resnet18"),
            ("resnet18", "resnet34"),
            ("resnet50", "resnet18"),
            ("mobilenet_v2", "resnet18"),
        ],
        fast=[("mobilenet_v2", "resnet18")],
    ),
    ids="-".join,
)
def test_another_architecture(tmp_path, pair):
    in_file, wanted = pair
    torch.save(torchvision.models.get_model(in_file).state_dict(), tmp_path / "file.pth")
    refused("another architecture.*model.body", tmp_path / "file.pth", body=wanted)


def test_a_deeper_iabn_network(tmp_path):
    write_iabn(tmp_path / "file.pth.tar", small_segmenter(body="resnet34"))
    refused(r"left over: layer1\.2", tmp_path / "file.pth.tar")


@pytest.mark.slow
def test_mib_checkpoints_that_do_not_fit(tmp_path):
    path = tmp_path / "file.pth"
    write_mib(path, small_segmenter(4, 1))
    refused(r"\[4, 1\] classes, the segmenter's \[3\]", path, load=load_mib)
    write_mib(path, small_segmenter())
    refused("no classifier", path, load=load_mib)
    write_mib(path, small_segmenter(3, body="resnet34"))
    refused("another architecture", path, load=load_mib)
    write_iabn(path, small_segmenter())
    refused("no `model_state`", path, load=load_mib)


@pytest.mark.parametrize("new_format", [True, False])
@pytest.mark.parametrize("part", [0.0, 0.001, 0.5, 0.99])
def test_truncated_file(tmp_path, new_format, part):
    path = tmp_path / "file.pth"
    state = {f"conv{i}.weight": torch.randn(64, 64, 3, 3) for i in range(4)}
    torch.save(state, path, _use_new_zipfile_serialization=new_format)
    path.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)])
    refused("file.pth: cannot be read, it is truncated.*get it again", path)


class Trap:
    def __reduce__(self):
        return Path.touch, (Path("trap_was_sprung"),)


@pytest.mark.slow
def test_pickled_objects_are_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {}, "trap": Trap()}, "object.pth")
    refused(r"object.pth: refused, it holds objects", "object.pth")
    Path("plain.pkl").write_bytes(pickle.dumps(Trap(), protocol=2))
    refused("plain.pkl: refused, it holds objects", "plain.pkl")
    torch.save(torchvision.models.resnet18(), "module.pth")
    refused("refused, it holds objects .*ResNet.*plain state_dict", "module.pth")
    assert not Path("trap_was_sprung").exists()


def test_other_content(tmp_path):
    torch.save([1, 2], tmp_path / "list.pth")
    refused("holds a list", tmp_path / "list.pth")
    torch.save({"encoder.weight": torch.zeros(2)}, tmp_path / "other.pth")
    refused("no known backbone in it .*encoder.weight", tmp_path / "other.pth")
    refused("no such file", tmp_path / "nowhere.pth")


def test_the_hash_in_the_name_is_verified(tmp_path):
    path = tmp_path / "resnet18-01234567.pth"
    torch.save(torchvision.models.resnet18().state_dict(), path)
    refused("sha256 does not start with 01234567", path)


def test_without_a_network_the_error_asks_for_a_path(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))

    def unreachable(*args, **kwargs):
        raise URLError("no route to host")

    monkeypatch.setattr(torch.hub, "download_url_to_file", unreachable)
    refused(r"resnet18-\w+\.pth: cannot be downloaded .*no route.*model.pretrained", "imagenet")
    refused("no ImageNet weights exist for resnet_tiny", "imagenet", body="resnet_tiny")


def test_imagenet_reads_the_downloaded_file(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    segmenter = small_segmenter()

    def download(url, path, hash_prefix):
        assert url.endswith(f"-{hash_prefix}.pth")
        torch.save(torchvision.models.resnet18().state_dict(), path)

    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    monkeypatch.setattr("models.pretrained.sha256_of", lambda path: path.stem.rsplit("-", 1)[1])
    report = load_backbone_weights(segmenter, "imagenet")
    assert Path(report.source).parent == tmp_path / "checkpoints"
