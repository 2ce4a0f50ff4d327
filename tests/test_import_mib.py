"""From somebody's MiB step to a run of ours."""

import json
import re

import pytest
import torch
from conftest import write_voc
from test_pretrained import randomised, signed_forward, write_mib

import train
from engine import checkpoint
from models.norm import ABN
from models.segmenter import build_segmenter
from scripts import import_mib

NETWORK = (
    "model.body=resnet18",
    "model.head_channels=8",
    "model.dilations=[1, 2, 3]",
    "model.output_stride=16",
)


@pytest.fixture
def mib_step_0(tmp_path):
    """A step 0 of 19-1 (20 classes with the background) under MiB's names."""
    torch.manual_seed(0)
    model = build_segmenter("resnet18", head_channels=8, dilations=(1, 2, 3))
    model.add_classes(20)
    write_mib(tmp_path / "19-1-voc_MiB_0.pth", model)
    return tmp_path / "19-1-voc_MiB_0.pth", model


def test_an_imported_step_predicts_the_same(mib_step_0, tmp_path, capsys):
    path, model = mib_step_0
    target = tmp_path / "step_0.pt"
    assert import_mib.main([str(path), str(target), "configs/voc/19-1.yaml", *NETWORK]) == 0
    assert "train.start_from=" in capsys.readouterr().out
    ours, state = checkpoint.load_segmenter(target)
    assert (
        state["step"] == 0
        and state["classes"][:2] == ["background", "aeroplane"]
        and len(state["class_ids"]) == 20
    )
    image = torch.randn(1, 3, 48, 48)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(image).logits, model.eval()(image).logits, rtol=0, atol=1e-6)


def test_an_imported_step_with_signed_norms_predicts_the_same(mib_step_0, tmp_path, monkeypatch):
    path, model = mib_step_0
    randomised(model, seed=3)
    write_mib(path, model)
    target = tmp_path / "step_0.pt"
    arguments = [str(path), str(target), "configs/voc/19-1.yaml", *NETWORK]
    assert import_mib.main([*arguments, "--norm-act", "abn"]) == 0
    ours, _ = checkpoint.load_segmenter(target)
    image = torch.randn(1, 3, 48, 48)
    with torch.no_grad():
        actual = ours.eval()(image).logits
        monkeypatch.setattr(ABN, "forward", signed_forward)
        expected = model.eval()(image).logits
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())


def test_at_output_stride_8_the_importer_wants_mibs_dilations_and_window(mib_step_0, tmp_path, capsys):
    path, _ = mib_step_0
    target = tmp_path / "step_0.pt"
    arguments = [str(path), str(target), "configs/voc/19-1.yaml", *NETWORK[:2], "model.output_stride=8"]
    assert import_mib.main(arguments) == 2
    named = re.findall(r"model\.(?:dilations|pooling)=\S+\d\]?", capsys.readouterr().err)
    assert named == ["model.dilations=[12,24,32]", "model.pooling=32"] and not target.exists()
    assert import_mib.main([*arguments, *named]) == 0
    head = checkpoint.load_segmenter(target)[0].head
    assert [conv.dilation[0] for conv in head.map_convs] == [1, 12, 24, 32] and head.pooling_size == 32


def test_the_wrong_protocol_is_refused(mib_step_0, tmp_path, capsys):
    path, _ = mib_step_0
    assert import_mib.main([str(path), str(tmp_path / "x.pt"), "configs/voc/15-1.yaml", *NETWORK]) == 2
    assert "[20] classes, those of 15-1 have [16]" in capsys.readouterr().err
    assert not (tmp_path / "x.pt").exists()


@pytest.mark.slow
def test_a_run_goes_on_from_an_imported_step(mib_step_0, tmp_path):
    path, _ = mib_step_0
    voc = write_voc(tmp_path / "voc", [[c] for c in range(1, 20)] + [[20]] * 4, [[1, 2], [20], [3]])
    target = tmp_path / "step_0.pt"
    assert import_mib.main([str(path), str(target), "configs/voc/19-1.yaml", *NETWORK]) == 0
    arguments = [
        "configs/voc/19-1.yaml",
        "configs/methods/mib.yaml",
        *NETWORK,
        f"data.root={voc}",
        "data.crop=32",
    ]
    arguments += [
        f"data.cache={tmp_path}/cache",
        "data.workers=0",
        "data.evaluate=full",
        "train.epochs_later=1",
    ]
    arguments += [
        "train.batch_size=4",
        f"run.folder={tmp_path}/runs",
        "run.name=on",
        f"train.start_from={target}",
    ]
    assert train.main([*arguments, "train.device=cpu"]) == 0
    steps = json.loads((tmp_path / "runs/on/results.json").read_text())["steps"]
    assert [step["step"] for step in steps] == [0, 1] and "tvmonitor" in steps[1]["iou"]
