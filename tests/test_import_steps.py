"""Steps of PLOP, DKD and STAR, in the layouts in which their authors save them, predict the same here."""

import json
from collections import OrderedDict

import numpy as np
import pytest
import torch
from conftest import write_voc
from test_pretrained import iabn_name, randomised, small_segmenter
from torch import nn
from torch.nn import functional as F

import train
from data.vision import torchvision
from engine import checkpoint
from engine.inference import predict
from models.pretrained import WeightsError
from scripts import import_mib

VOC = "configs/voc/15-1.yaml"
OF_DKD = ("configs/methods/dkd.yaml", "model.body=resnet50_relu", "model.head=aspp", "model.head_channels=8")


def image(size=(64, 48)):
    return torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(0))


# ---- PLOP --------------------------------------------------------------------------------------------------


def write_plop(path, segmenter, **further):
    """As PLOP's run.py saves a model in its distributed wrapper."""
    state = OrderedDict()
    for name, tensor in segmenter.state_dict().items():
        part, rest = name.split(".", 1)
        theirs = {"body": f"body.{iabn_name(rest)}", "head": name, "classifiers": f"cls.{rest}"}[part]
        state[f"module.{theirs}"] = tensor
    state["module.body.mod1.bn1.num_batches_tracked"] = torch.tensor(7)
    facts = {"epoch": 29, "best_score": np.float64(0.6), "trainer_state": None}
    schedule = {"base_lrs": [0.01, 0.01, 0.01], "last_epoch": 900, "power": 0.9}
    torch.save(
        {**facts, "model_state": state | further, "optimizer_state": {}, "scheduler_state": schedule}, path
    )


def test_a_step_of_plop_predicts_the_same(tmp_path):
    model = small_segmenter(16, 1, seed=1).eval()
    write_plop(tmp_path / "15-5s-voc_PLOP_1.pth", model)
    options = ("configs/methods/plop.yaml", "model.body=resnet18", "model.head_channels=8")
    arguments = [str(tmp_path / "15-5s-voc_PLOP_1.pth"), str(tmp_path / "step_1.pt"), VOC, *options]
    assert import_mib.main(arguments) == 0
    ours, state = checkpoint.load_segmenter(tmp_path / "step_1.pt")
    assert state["step"] == 1 and len(state["classes"]) == 17 and ours.rule is None
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(image()).logits, model(image()).logits, rtol=0, atol=1e-6)


def test_cosine_classifiers_of_plop_are_refused(tmp_path):
    write_plop(tmp_path / "file.pth", small_segmenter(16), **{"module.scalar": torch.tensor(1.0)})
    with pytest.raises(WeightsError, match="--cosine"):
        import_mib.convert(tmp_path / "file.pth", tmp_path / "step_0.pt", [VOC, "model.body=resnet18"])


# ---- DKD and STAR ------------------------------------------------------------------------------------------


def unit(in_channels, out_channels, size, dilation=1):
    padding = dilation if size == 3 else 0
    conv = nn.Conv2d(in_channels, out_channels, size, padding=padding, dilation=dilation, bias=False)
    return [conv, nn.BatchNorm2d(out_channels), nn.ReLU()]


class Theirs(nn.Module):
    """The network of DKD and STAR with a smaller backbone: `classes` are those of its classifiers."""

    def __init__(self, classes, width=8):
        super().__init__()
        self.backbone = torchvision.models.resnet50(replace_stride_with_dilation=[False, False, True])
        del self.backbone.fc, self.backbone.avgpool
        self.aspp = nn.Module()
        branches = [unit(2048, width, 1), *(unit(2048, width, 3, d) for d in (6, 12, 18))]
        branches.append([nn.AdaptiveAvgPool2d(1), *unit(2048, width, 1)])
        self.aspp.convs = nn.ModuleList([nn.Sequential(*branch) for branch in branches])
        self.aspp.project = nn.Sequential(*unit(5 * width, width, 1), nn.Dropout(0.1))
        self.aspp.last_conv = nn.Sequential(*unit(width, width, 3))
        self.cls = nn.ModuleList([nn.Conv2d(width, num, 1) for num in classes])

    def forward(self, x):
        body, size = self.backbone, x.shape[-2:]
        x = body.maxpool(body.relu(body.bn1(body.conv1(x))))
        x = body.layer4(body.layer3(body.layer2(body.layer1(x))))
        maps = [F.interpolate(branch(x), x.shape[-2:], mode="bilinear") for branch in self.aspp.convs]
        x = self.aspp.last_conv(self.aspp.project(torch.cat(maps, dim=1)))
        return F.interpolate(torch.cat([cls(x) for cls in self.cls], dim=1), size, mode="bilinear")


def their_prediction(foreground):
    """The class of the largest sigmoid, background where none exceeds 1/2."""
    probabilities = foreground.sigmoid()
    classes = probabilities.argmax(dim=1) + 1
    classes[(probabilities > 0.5).sum(dim=1) == 0] = 0
    return classes


def write_theirs(path, classes):
    torch.manual_seed(1)
    network = randomised(Theirs(classes), seed=1).eval()
    with torch.no_grad():
        middle = network(image()).amax(dim=1).median()
        for cls in network.cls:  # so that some pixels are of no class
            cls.bias -= middle
    facts = {"arch": "DeepLabV3", "epoch": 60, "monitor_best": 0, "optimizer": {}, "lr_scheduler": {}}
    torch.save({**facts, "state_dict": network.state_dict(), "scaler": {"scale": 65536.0}}, path)
    return network


@pytest.mark.parametrize(("kind", "first"), [("DKD", [1]), ("STAR", [])])
@pytest.mark.parametrize("later", [0, 2])
def test_a_step_of_dkd_or_star_predicts_the_same(tmp_path, kind, first, later, capsys):
    path, target = tmp_path / "checkpoint-epoch60.pth", tmp_path / f"step_{later}.pt"
    theirs = write_theirs(path, [*first, 15, *[1] * later])
    assert import_mib.main([str(path), str(target), VOC, *OF_DKD]) == 0
    assert f"{path}: {kind}, " in capsys.readouterr().out
    ours, state = checkpoint.load_segmenter(target)
    assert state["step"] == later and state["classes"][0] == "background"
    assert len(state["class_ids"]) == 16 + later == checkpoint.num_new(state) + (later and 15 + later)
    with torch.no_grad():
        logits = theirs(image())[:, len(first) :]
        actual = ours.eval()(image()).logits
        predicted = predict(ours, image()).argmax(dim=1)
    torch.testing.assert_close(actual, logits, rtol=1e-4, atol=1e-5)
    expected = their_prediction(logits)
    assert (predicted == expected).float().mean() > 0.999  # but for ties within rounding
    assert 0 < (expected == 0).float().mean() < 1


@pytest.mark.slow
def test_an_imported_step_is_scored_without_training(tmp_path, capsys):
    write_theirs(tmp_path / "file.pth", [1, 19])
    target = tmp_path / "step_0.pt"
    network = ["configs/voc/19-1.yaml", *OF_DKD]
    assert import_mib.main([str(tmp_path / "file.pth"), str(target), *network]) == 0
    images = [[c] for c in (*range(1, 21), 20)]
    root = write_voc(tmp_path / "voc", images, images)
    options = (
        "train.last_step=0",
        "data.evaluate=full",
        "data.workers=0",
        "train.device=cpu",
        "data.crop=32",
    )
    places = (f"data.root={root}", f"data.cache={tmp_path}", f"run.folder={tmp_path}/runs", "run.name=scored")
    small = ("train.batch_size=2", "train.epochs_later=1", "run.pictures=0", "run.tracker=none")
    arguments = [*network, *options, *places, *small, f"train.start_from={target}"]
    assert train.main(arguments) == 0
    (scored,) = json.loads((tmp_path / "runs/scored/results.json").read_text())["steps"]
    assert scored["step"] == 0 and np.array(scored["confusion"]).sum() > 0
    assert np.array(scored["confusion"]).shape[1] == 20  # the background, which has no classifier, too
    assert train.main([*arguments, "train.last_step=1"]) == 0  # DKD goes on from it
    before, after = (
        checkpoint.load(place)["model"] for place in (target, tmp_path / "runs/scored/step_1.pt")
    )
    new, auxiliary = after["classifiers.1.weight"], before["further.auxiliary.weight"]
    torch.testing.assert_close(new, auxiliary, rtol=0, atol=0.05)  # where it started
    assert not torch.equal(after["head.last_conv.0.weight"], before["head.last_conv.0.weight"])


def test_files_that_do_not_fit_say_what_to_set(tmp_path):
    path, target = tmp_path / "file.pth", tmp_path / "step_0.pt"
    write_theirs(path, [1, 15])
    with pytest.raises(WeightsError, match=r"classifiers have \[1, 15\].*give the protocol"):
        import_mib.convert(path, target, ["configs/voc/19-1.yaml", *OF_DKD])
    with pytest.raises(WeightsError, match=r"another architecture.*set model.body"):
        import_mib.convert(path, target, [VOC, "model.body=resnet50", "model.head_channels=8"])
    torch.save(
        {"state_dict": {"backbone.mod1.conv1.weight": torch.zeros(1), "cls.0.weight": torch.zeros(1)}}, path
    )
    with pytest.raises(WeightsError, match="iabn_sync"):
        import_mib.convert(path, target, [VOC, *OF_DKD])
