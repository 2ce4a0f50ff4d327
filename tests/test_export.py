"""scripts.export: what comes back, and what is said of a folder that is not whole."""

import json
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import train
from engine import checkpoint, exported
from engine.api import load_segmenter
from engine.exported import ExportError, read_export, write_export
from engine.identity import state_digest
from scripts import export, predict

ROOT = Path(train.__file__).parent
FILES = ["README.md", "config.json", "model.safetensors", "results.json"]
EWC = ("method.name=ewc", "method.strength=10", "train.epochs=1", "train.epochs_later=1")


def exported_step(run: Path, folder: Path, *options: str) -> Path:
    assert export.main([str(run), str(folder), *options]) == 0
    return folder


def results_of(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def same(one, other) -> bool:
    """Whether two states are equal to the last bit, and of the same types."""
    if type(one) is not type(other) and not isinstance(one, Mapping):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


# ---- what comes back ---------------------------------------------------------------------------------------

STATE = {
    "step": 1,
    "model": {"a.w": torch.randn(3, 2, 4, 4).to(memory_format=torch.channels_last), "n": torch.tensor(7)},
    "methods": {"ewc": {"of": [torch.ones(2), torch.zeros(0)], 3: (1, 2.5, None), 4: torch.tensor([True])}},
    "costs": {"seconds": 0.1 + 0.2, "inf": float("inf"), "$float": "a key of somebody's own"},
    "network": {"arguments": {"dilations": (1, 2, 3)}},
    "added later": {"half": torch.tensor([0.5], dtype=torch.bfloat16), "view": torch.arange(6).view(2, 3).T},
    "same/name": torch.tensor(1),
    "same": {"name": torch.tensor(2)},
}  # fmt: skip


def test_whatever_a_step_holds_comes_back(tmp_path):
    write_export(tmp_path / "out", STATE, "card")
    assert same(read_export(tmp_path / "out"), STATE)
    assert {path.name for path in tmp_path.rglob("*")} == {
        *("out", "README.md", "config.json", "model.safetensors", "statistics.safetensors")
    }


def test_what_json_cannot_hold_is_refused_and_leaves_nothing(tmp_path):
    for value in (object(), {(1, 2): 3}, b"bytes"):
        with pytest.raises(ExportError, match="has no place in an export"):
            write_export(tmp_path / "out", STATE | {"odd": value}, "")
    assert list(tmp_path.iterdir()) == []


def test_a_step_of_a_run_comes_back_as_it_was(toy_run, tmp_path):
    run = toy_run()
    folder = exported_step(run, tmp_path / "out")
    assert sorted(path.name for path in folder.iterdir()) == FILES
    before, after = checkpoint.load(run / "step_1.pt"), checkpoint.load(folder)
    assert same(after, before) and state_digest(after) == state_digest(before)
    assert json.loads((folder / "config.json").read_text())["method"] == "mib"
    again = exported_step(folder, tmp_path / "again")  # an export is exported like a checkpoint
    assert {name: (again / name).read_bytes() for name in FILES} == {
        name: (folder / name).read_bytes() for name in FILES
    }


def test_nothing_that_is_exported_is_a_pickle(toy_run, tmp_path):
    for path in exported_step(toy_run(*EWC), tmp_path / "out").iterdir():
        assert path.suffix in (".md", ".json", ".safetensors")
        assert not path.read_bytes().startswith((b"PK", b"\x80")), path  # torch's zip, or pickle's own mark


# ---- used like a checkpoint --------------------------------------------------------------------------------


def test_evaluation_of_an_export_gives_the_same_confusion_matrix(toy_run, toy_arguments, tmp_path):
    run = toy_run()
    folder = exported_step(run, tmp_path / "out")
    (folder / "results.json").unlink()  # or they would be taken over, and nothing scored
    arguments = ("method.name=mib", f"train.start_from={folder}", "train.evaluate_only=true")
    assert train.main(toy_arguments(*arguments, "train.first_step=1", name="scored")) == 0
    (scored,) = results_of(tmp_path / "runs/scored")["steps"]
    assert scored["step"] == 1 and scored["confusion"] == results_of(run)["steps"][1]["confusion"]


def test_a_run_from_an_export_has_the_bits_of_one_from_the_step(toy_run, toy_arguments, tmp_path, capsys):
    run = toy_run(*EWC)
    folder = exported_step(run, tmp_path / "out", "--step", "0")
    assert (folder / "statistics.safetensors").is_file()
    for name, source in {"from_pt": run / "step_0.pt", "from_export": folder}.items():
        assert train.main(toy_arguments(*EWC, f"train.start_from={source}", name=name)) == 0
    one, other = (tmp_path / "runs" / name for name in ("from_pt", "from_export"))
    assert same(*(checkpoint.load(path / "step_1.pt")["model"] for path in (one, other)))
    keys = ("iou", "confusion", "miou", "mean_forgetting")
    for first, second in zip(results_of(one)["steps"], results_of(other)["steps"], strict=True):
        assert all(first[key] == second[key] for key in keys)
    started = [results_of(path)["started_from"]["sha256"] for path in (one, other)]
    assert started[0] == started[1]
    shutil.rmtree(folder)  # the run has a copy
    capsys.readouterr()
    assert train.main(toy_arguments(*EWC, f"train.start_from={folder}", name="from_export")) == 0
    assert "nothing was trained" in capsys.readouterr().out


def test_an_export_without_statistics_says_so(toy_run, toy_arguments, tmp_path, capsys):
    folder = exported_step(toy_run(*EWC), tmp_path / "out", "--step", "0", "--weights-only")
    assert not (folder / "statistics.safetensors").exists()
    assert train.main(toy_arguments(*EWC, f"train.start_from={folder}", name="other")) == 2
    assert "step 0 left no statistics of 'ewc' (only of: no method)" in capsys.readouterr().err
    assert train.main(toy_arguments("method.name=mib", f"train.start_from={folder}", name="mib")) == 0


def test_predictions_are_those_of_the_checkpoint(toy_run, toy_voc, tmp_path, capsys):
    run = toy_run()
    folder = exported_step(run, tmp_path / "out")
    image = toy_voc / "JPEGImages/val_000.jpg"
    for name, source in {"pt": run / "step_1.pt", "folder": folder}.items():
        assert predict.main([str(source), str(image), "--out", str(tmp_path / name)]) == 0
    files = [tmp_path / name / "val_000_mask.png" for name in ("pt", "folder")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert predict.main([str(folder), str(image), "--out", str(tmp_path / "x"), "--step", "0"]) == 2
    assert "is one step" in capsys.readouterr().err


# ---- in Python ---------------------------------------------------------------------------------------------


def test_the_documented_lines_run(toy_run, toy_voc, tmp_path, monkeypatch, capsys):
    exported_step(toy_run(), tmp_path / "mib-voc-15-1")
    shutil.copy(toy_voc / "JPEGImages/val_000.jpg", tmp_path / "holiday.jpg")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/predict.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(block.splitlines()) <= 10
    capsys.readouterr()
    exec(block, {})
    assert "(32, 32)" in capsys.readouterr().out


def test_images_may_be_paths_arrays_or_images(toy_run, toy_voc, tmp_path):
    run, path = toy_run(), toy_voc / "JPEGImages/val_002.jpg"
    with Image.open(path) as image:
        pixels = np.asarray(image)
    segmenter = load_segmenter(run, "cpu")
    assert segmenter.step == 1 and segmenter.names[3] == "bird"
    one, *others = segmenter.predict([path, str(path), pixels, Image.fromarray(pixels)])
    assert one.shape == (32, 32) and one.dtype == np.uint8 and all((one == other).all() for other in others)
    assert (segmenter.predict(path)[0] == one).all()
    assert load_segmenter(run, "cpu", step=0).step == 0
    small = load_segmenter(run, torch.device("cpu"), size=16).predict(pixels)[0]
    assert small.shape == (32, 32)  # as large as the image, whatever the network was shown
    with pytest.raises(ValueError, match="H x W x 3 bytes"):
        segmenter.predict(pixels / 255.0)


# ---- not whole ---------------------------------------------------------------------------------------------


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: not that of an export"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors: No such file"),
    "no statistics": (lambda f: (f / "statistics.safetensors").unlink(), "statistics.safetensors: No such"),
    "flipped": (lambda f: flip(f / "model.safetensors"), "model.safetensors: is not what config.json says"),
    "cut": (lambda f: (f / "model.safetensors").write_bytes(b""), "is not what config.json says"),
    "half a config": (lambda f: (f / "config.json").write_text('{"format": '), "not that of an export"),
    "a list": (lambda f: (f / "config.json").write_text("[]"), "not that of an export"),
    "another's": (lambda f: change(f / "config.json", "a step of", "BERT of"), "not that of an export"),
    "newer": (lambda f: change(f / "config.json", '"version": 1', '"version": 2'), "is of version 2"),
    "renamed": (lambda f: change(f / "config.json", '"aeroplane"', '"bicycle"'), "was changed since"),
    "a path": (lambda f: change(f / "config.json", '"model.saf', '"../model.saf'), "names other files"),
    "empty": (
        lambda f: [path.unlink() for path in f.iterdir()],
        "no such checkpoint, but a folder without config.json",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_export_is_refused(damage, toy_run, tmp_path):
    folder = exported_step(toy_run(*EWC), tmp_path / "out")
    harm, said = DAMAGES[damage]
    harm(folder)
    with pytest.raises(checkpoint.CheckpointError, match=re.escape(said)):
        checkpoint.load_segmenter(folder)


def test_programs_refuse_it_without_a_traceback(toy_run, toy_arguments, toy_voc, tmp_path, capsys):
    folder = exported_step(toy_run(), tmp_path / "out", "--step", "0")
    flip(folder / "model.safetensors")
    capsys.readouterr()
    assert train.main(toy_arguments("method.name=mib", f"train.start_from={folder}", name="new")) == 2
    assert predict.main([str(folder), str(toy_voc), "--out", str(tmp_path / "seen")]) == 2
    assert export.main([str(folder), str(tmp_path / "again")]) == 2
    error = capsys.readouterr().err
    assert error.count("is not what config.json says") == 3 and "Traceback" not in error
    assert not (tmp_path / "again").exists()
    assert train.main(toy_arguments(f"train.start_from={tmp_path / 'runs'}", name="new")) == 2
    assert "name a step_<i>.pt, or a folder that scripts.export has written" in capsys.readouterr().err


def test_tensors_that_are_named_and_missing_are_said(tmp_path):
    write_export(tmp_path / "out", STATE, "card")
    path = tmp_path / "out/config.json"
    config = json.loads(path.read_text())
    config["state"]["methods"]["ewc"] = {"$tensor": "elsewhere"}
    config["sha256"] = exported._digest(exported._canonical(config["state"]))
    path.write_text(json.dumps(config))
    with pytest.raises(ExportError, match="names what is not there"):
        read_export(tmp_path / "out")


# ---- the command -------------------------------------------------------------------------------------------


def test_what_is_there_is_never_replaced(toy_run, tmp_path, capsys):
    run = toy_run()
    folder = exported_step(run, tmp_path / "new/out")
    before = (folder / "README.md").stat().st_mtime_ns
    assert export.main([str(run), str(folder)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert (folder / "README.md").stat().st_mtime_ns == before
    (tmp_path / "empty").mkdir()
    exported_step(run, tmp_path / "empty")


@pytest.mark.parametrize(
    ("source", "said"), [("nowhere", "no such run folder"), ("runs/run/step_7.pt", "no such run folder")]
)
def test_a_source_that_is_none_is_explained(source, said, toy_run, tmp_path, capsys):
    toy_run()
    assert export.main([str(tmp_path / source), str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert export.main([str(tmp_path / "runs/run"), str(tmp_path / "out"), "--step", "7"]) == 2
    assert "no step 7; it has 0, 1" in capsys.readouterr().err


def test_without_the_package_it_is_asked_for(toy_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.delitem(sys.modules, "safetensors.torch", raising=False)
    assert export.main([str(toy_run()), str(tmp_path / "out")]) == 2
    assert "pip install safetensors" in capsys.readouterr().err


# ---- the model card ----------------------------------------------------------------------------------------


def test_the_card_says_where_the_weights_come_from(toy_run, tmp_path):
    run = toy_run("method.name=mib", "phase.name=altersgd", "phase.p=0.5")
    folder = exported_step(run, tmp_path / "out", "--license", "cc-by-4.0")
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    told = yaml.safe_load(front)
    assert told["license"] == "cc-by-4.0" and told["pipeline_tag"] == "image-segmentation"
    assert {"mib", "altersgd", "continual-learning"} <= set(told["tags"])
    (result,) = told["model-index"][0]["results"]
    recorded = results_of(run)
    shown = {metric["name"]: metric["value"] for metric in result["metrics"]}
    assert shown == {
        f"mIoU of {group} classes": round(100 * value, 2)
        for group, value in recorded["steps"][1]["miou"].items()
    }
    commit = recorded["environment"]["commit"] or "not recorded"
    for said in ("| 1 | bird (3) |", f"| commit | {commit} |", "| phase.p | 0.5 |", "own steps (disjoint)"):
        assert said in text
    assert recorded["data"]["train"] in text


def test_hostile_names_are_text_in_the_card(tmp_path):
    from engine.model_card import model_card

    name = "a|b\n---\n<script>"
    state = {"step": 0, "class_ids": [0, 1], "classes": ["background", name], "methods": {}, "costs": {}}
    state |= {"network": {"arguments": {}, "classifiers": [2]}, "config": ""}
    card = model_card(state, None, "mit")
    assert "<script" not in card and card.count("\n---\n") == 1 and r"a\|b" in card
