"""SSUL: labels, pseudo-labels and loss against loops over pixels; what is frozen; saliency maps."""

import json
import math

import numpy as np
import pytest
import torch
from conftest import TINY_NETWORK
from PIL import Image
from toys import student_and_teacher

import train
from data.protocols import IGNORE_INDEX, SALIENT, steps_from_lists
from engine import checkpoint
from methods import METHODS, make_method
from models.segmenter import Output, build_segmenter

STEPS = steps_from_lists([[1, 2], [3]])
QUICK = ("train.epochs=1", "train.epochs_later=2", "run.pictures=0", "run.tracker=none")


def bce(z: float, y: bool) -> float:
    s = 1 / (1 + math.exp(-z))
    return -math.log(s) if y else -math.log(1 - s)


@pytest.mark.parametrize("losses", ["plain", "fused"])
@pytest.mark.parametrize("saliency", [None, "maps"])
@pytest.mark.parametrize("mean_over", ["all", "valid"])
def test_the_loss_against_a_loop_over_pixels(losses, saliency, mean_over):
    torch.manual_seed(0)
    logits = 2 * torch.randn(2, 5, 4, 4, dtype=torch.float64)  # unknown, background, 1, 2, 3
    labels = torch.randint(4, (2, 4, 4))
    labels[:, 0], labels[:, 1, :2] = IGNORE_INDEX, SALIENT if saliency else 0
    method = make_method("ssul", mean_over, {"saliency": saliency} if saliency else {}, losses)
    total = count = 0
    for b, row, column in np.ndindex(2, 4, 4):
        label = labels[b, row, column].item()
        if label == IGNORE_INDEX:
            continue
        count += 1
        unknown = label == (SALIENT if saliency else 0)
        place = 0 if unknown else label + 1
        total += sum(bce(logits[b, c, row, column].item(), c == place) for c in range(5))
    count = labels.numel() if mean_over == "all" else count
    assert method.segmentation_loss(logits, labels).item() == pytest.approx(total / count, rel=1e-10)


def test_pseudo_labels_stand_where_nothing_is_labelled_and_the_teacher_is_sure_of_an_object():
    teacher = torch.full((1, 4, 1, 6), -5.0)  # unknown, background, 1, 2
    teacher[0, 3, 0, 0] = 3.0  # sure of class 2
    teacher[0, 3, 0, 1] = 0.5  # s(0.5) = 0.62 < 0.7
    teacher[0, 0, 0, 2], teacher[0, 2, 0, 2] = 4.0, 3.0  # rather unknown than class 1
    teacher[0, 2, 0, 3] = teacher[0, 2, 0, 4] = teacher[0, 2, 0, 5] = 3.0  # sure of class 1
    labels = torch.tensor([[[0, 0, 0, SALIENT, 3, IGNORE_INDEX]]])
    found = make_method("ssul").targets(labels, Output(teacher, teacher))
    assert found.tolist() == [[[2, 0, 0, 1, 3, IGNORE_INDEX]]]


def test_background_is_background_or_unknown():
    logits = torch.tensor([1.0, 0.0, 1.1, -2.0]).view(1, 4, 1, 1)
    scores = METHODS["ssul"].rule(3)(logits)[0, :, 0, 0]
    unknown, background, one, two = torch.tensor([1.0, 0.0, 1.1, -2.0]).sigmoid()
    expected = torch.stack([background + unknown, one, two])
    assert torch.allclose(scores, expected) and scores.argmax() == 0


def test_new_heads_start_as_the_head_of_the_unknown_class():
    model, method = build_segmenter(**TINY_NETWORK).eval(), make_method("ssul")
    for step in steps_from_lists([[1, 2], [3, 4]]):
        method.add_classifier(model, step)
    method.init_classifier(model)
    logits = model(torch.randn(1, 3, 32, 32)).logits
    assert logits.shape[1] == 6
    for new in (4, 5):  # a processor may round the rows of a product each in its own way
        assert torch.allclose(logits[:, new], logits[:, 0], rtol=1e-5, atol=1e-6)


def test_later_steps_move_the_heads_of_new_unknown_and_background_alone(toy_arguments, tmp_path):
    assert train.main(toy_arguments("method.name=ssul", *QUICK)) == 0
    run = tmp_path / "runs" / "run"
    before, after = (checkpoint.load(run / f"step_{i}.pt")["model"] for i in (0, 1))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    parts = ("0.weight", "2.weight", "2.bias")
    assert moved == {f"classifiers.{head}.{part}" for head in (0, 1) for part in parts}
    remarks = json.loads((run / "results.json").read_text())["remarks"]
    assert remarks == ["own step 0", "no saliency maps: all that has no label is unknown"]


def test_the_heads_have_learning_rates_of_their_own():
    method, student, _, _ = student_and_teacher("ssul")
    groups = method.parameter_groups(student)
    assert [group.get("lr_scale", 1.0) for group in groups] == [1.0, 1e-4]
    assert {id(p) for p in groups[1]["params"]} == {id(p) for p in student.classifiers[1].parameters()}
    assert sorted(id(p) for g in groups for p in g["params"]) == sorted(id(p) for p in student.parameters())


def test_saliency_maps_are_read_with_the_masks(toy_arguments, toy_voc, tmp_path, capsys):
    maps = tmp_path / "maps"
    given = ("method.name=ssul", f"method.options.saliency={maps}", *QUICK)
    assert train.main(toy_arguments(*given)) == 2
    assert "no folder" in capsys.readouterr().err
    maps.mkdir()
    assert train.main(toy_arguments(*given)) == 2
    assert "no such saliency map" in capsys.readouterr().err
    for mask in (toy_voc / "SegmentationClassAug").glob("train*.png"):
        Image.fromarray(np.full((32, 32), 255, np.uint8)).save(maps / mask.name)
    assert train.main(toy_arguments(*given)) == 0
    results = json.loads((tmp_path / "runs" / "run" / "results.json").read_text())
    assert "saliency maps" in results["remarks"]


def test_salient_background_is_marked_and_nothing_else(tmp_path):
    from data.loaders import mark_salient

    labels = np.array([[0, 0, 1], [2, 255, 0]], np.uint8)
    Image.fromarray(np.array([[0, 9, 9], [9, 9, 1]], np.uint8)).save(tmp_path / "a.png")
    marked = mark_salient(labels, tmp_path / "a.png")
    assert marked.tolist() == [[0, SALIENT, 1], [2, 255, SALIENT]]


def test_what_is_frozen_is_nothing_to_fuse(toy_arguments, capsys):
    assert train.main(toy_arguments("method.name=ssul", "average.name=ewf")) == 2
    assert "has nothing to fuse" in capsys.readouterr().err
