"""What a method may ask of the network, the optimizer, the data and the evaluation, beyond two losses."""

import copy
import json
import sys

import numpy as np
import pytest
import torch
from conftest import TINY_NETWORK
from PIL import Image
from test_registry import add_file  # noqa: F401 (a fixture)

import train
from data.protocols import steps_from_lists
from engine import checkpoint
from engine.inference import predict
from engine.optim import set_learning_rate
from engine.prediction import Network
from methods import METHODS, AlterSGD, Batch, Method, make_method
from models.segmenter import build_segmenter, rebuild_segmenter

STEPS = steps_from_lists([[1, 2], [3]])
QUICK = ("train.epochs=1", "train.epochs_later=1", "run.pictures=0", "run.tracker=none")


def network(*sizes: int):
    model = build_segmenter(**TINY_NETWORK)
    for size in sizes:
        model.add_classes(size)
    return model


# ---- the network -------------------------------------------------------------------------------------------


def test_frozen_parts_stay_in_eval_and_without_gradients_whatever_train_says():
    model = network(3, 1)
    model.freeze(model.body, *model.classifiers[:1])
    before = {name: t.clone() for name, t in model.state_dict().items()}
    for _ in range(2):
        model.eval()
        model.train()
        model(torch.randn(2, 3, 32, 32)).logits.square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not any(module.training for part in model.frozen for module in part.modules())
    assert model.head.training and model.classifiers[1].training
    for name, tensor in model.state_dict().items():
        frozen = name.startswith(("body.", "classifiers.0."))
        assert torch.equal(tensor, before[name]) == frozen, name


def test_frozen_norms_keep_statistics_scales_and_shifts():
    model = network(3)
    model.freeze(*model.norms())
    model.train()
    norms = [name for name, module in model.named_modules() if hasattr(module, "running_mean")]
    before = {name: t.clone() for name, t in model.state_dict().items()}
    model(torch.randn(2, 3, 32, 32)).logits.square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    moved = {
        name.rpartition(".")[0] for name, t in model.state_dict().items() if not torch.equal(t, before[name])
    }
    assert norms and moved and moved.isdisjoint(norms)


def test_a_frozen_copy_leaves_the_methods_hooks_where_they_are():
    model, method = network(3), make_method("dkd")
    method.keepsake = torch.zeros(3)
    model.extra_outputs, model.rule = method.outputs, METHODS["dkd"].rule(3)
    for copied in (model.frozen_copy(), copy.deepcopy(model)):
        assert copied.extra_outputs.__self__ is method and copied.rule is model.rule
        assert copied.head is not model.head


def test_deep_and_further_classifiers_are_built_again_from_their_outline():
    model = network(3)
    model.add_classes(2, hidden=6)
    model.add_further("unknown", 1)
    model.add_further("deep", 2, 5)
    assert model.outline() == {"classifiers": [3, [2, 6]], "further": {"unknown": 1, "deep": [2, 5]}}
    again = rebuild_segmenter(TINY_NETWORK, model.outline(), model.state_dict())
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(again.eval()(images).logits, model.eval()(images).logits)
    assert again.num_classes == 5 and again.further.keys() == model.further.keys()


def test_a_checkpoint_of_plain_classifiers_has_no_new_keys(toy_run):
    state = checkpoint.load(toy_run() / "step_1.pt")
    assert state["network"].keys() == {"arguments", "classifiers"} and state["network"]["classifiers"] == [
        3,
        1,
    ]


# ---- learning rates and weight decay -----------------------------------------------------------------------


def groups_of(optimizer) -> list[tuple[float, float]]:
    return [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]


def test_a_group_may_have_another_learning_rate_and_weight_decay_also_where_the_phase_changes_them():
    groups = [
        {"params": [torch.zeros(1)], "lr_scale": 0.1},
        {"params": [torch.zeros(1)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=2.0, momentum=0.9, weight_decay=0.5)
    phase = AlterSGD(p=0.5, weight_decay="signed")
    for iteration, sign in ((1, 1), (3, 1), (4, -1), (3, 1)):
        set_learning_rate(optimizer, lambda progress: 1 - progress, iteration, 4)
        phase.prepare(optimizer, iteration, 4)
        lr = 2.0 * (1 - (iteration - 1) / 4)
        assert groups_of(optimizer) == [(0.1 * lr, sign * 0.5), (lr, 0.0)]


def test_dkd_slows_the_backbone_and_later_decays_only_the_new_classifier():
    model, method = network(2), make_method("dkd")
    model.add_further("auxiliary", 1)
    for step, decays in ((STEPS[0], [True, True, True]), (STEPS[1], [False, False, True])):
        if step.index:
            model.add_classes(1)
        method.begin_step(model, step)
        groups = method.parameter_groups(model)
        assert [g.get("weight_decay", 1.0) > 0 for g in groups] == decays
        assert [g.get("lr_scale", 1.0) for g in groups] == [0.1, 1.0, 1.0]
        listed = [id(p) for group in groups for p in group["params"]]
        assert sorted(listed) == sorted(id(p) for p in model.parameters())  # each once


# ---- the rule of prediction --------------------------------------------------------------------------------


def test_a_rule_is_used_by_every_way_to_predict():
    model = network(2).eval()  # no background
    model.rule = METHODS["dkd"].rule(3)
    images = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        flipped = model(images.flip(-1)).logits.flip(-1).sigmoid()
        plain = model(images).logits.sigmoid()
    half = torch.full_like(plain[:, :1], 0.5)
    assert torch.equal(predict(model, images), torch.cat([half, plain], dim=1))
    averaged = predict(model, images, flip=True)
    assert torch.allclose(averaged, torch.cat([half, (plain + flipped) / 2], dim=1), atol=1e-6)
    assert predict(model, images, window=32).shape == (2, 3, 48, 48)
    guess = predict(model, images).argmax(dim=1)
    assert torch.equal(guess == 0, (plain <= 0.5).all(dim=1))  # background where no sigmoid exceeds 1/2
    assert {0, 1, 2} >= set(guess.unique().tolist())


def test_a_checkpoint_knows_the_rule_and_evaluation_and_predict_follow_it(toy_arguments, toy_voc, tmp_path):
    assert train.main(toy_arguments("method.name=dkd", *QUICK)) == 0
    run = tmp_path / "runs" / "run"
    state = checkpoint.load(run / "step_1.pt")
    assert state["network"]["rule"] == "dkd" and state["network"]["classifiers"] == [2, 1]
    model, _ = checkpoint.load_segmenter(run / "step_1.pt")
    assert (
        model.rule is not None and len(json.loads((run / "results.json").read_text())["steps"][1]["iou"]) == 4
    )
    network_seen = Network(run / "step_1.pt", torch.device("cpu"), size=None, megapixels=2.0, flip=False)
    sight = network_seen.look(Image.open(next((toy_voc / "JPEGImages").iterdir())), with_probabilities=True)
    assert sight.probabilities is not None and sight.probabilities.shape[0] == 4
    assert np.array_equal(np.unique(sight.probabilities[0]), [0.5]) and network_seen.title == (
        "step 1",
        "+ bird",
    )


def test_a_checkpoint_whose_rule_is_unknown_is_refused_with_the_methods_name(toy_arguments, tmp_path):
    assert train.main(toy_arguments("method.name=dkd", *QUICK, "train.last_step=0")) == 0
    path = tmp_path / "runs" / "run" / "step_0.pt"
    state = checkpoint.load(path)
    state["network"]["rule"] = "mine"
    checkpoint.save(state, path)
    with pytest.raises(checkpoint.CheckpointError, match=r"rule of method 'mine'.*put its file"):
        checkpoint.load_segmenter(path)


# ---- what the terms see ------------------------------------------------------------------------------------

CURIOUS = """
import torch
from methods.base import Method, register

SEEN = []

@register("curious")
class Curious(Method):
    needs_teacher = True
    memory = "half"
    reviewed = 0

    def learn(self, student, batch):
        SEEN.append(("learn", batch.images.shape, batch.labels.shape, batch.remembered, student.hidden.shape))
        return super().learn(student, batch)

    def keep(self, student, teacher, batch):
        old = (batch.labels < self.num_old)[:, None]
        SEEN.append(("keep", [s.index for s in self.protocol]))
        return {"old": ((student.logits[:, : self.num_old] - teacher.logits) ** 2 * old).mean()}

    def review(self, images):
        self.reviewed = sum(len(labels) for labels, output in images if not output.logits.requires_grad)
        SEEN.append(("review", self.reviewed))

    def state_dict(self):
        return {"reviewed": self.reviewed}

    def load_state_dict(self, state):
        self.reviewed = state["reviewed"]
"""


def test_terms_see_images_labels_memory_features_and_the_protocol(add_file, toy_arguments, tmp_path):  # noqa: F811
    add_file(METHODS, CURIOUS, "curious")
    module = sys.modules["methods.curious"]
    assert train.main(toy_arguments("method.name=curious", "method.memory=4", *QUICK)) == 0
    learned = [seen for seen in module.SEEN if seen[0] == "learn"]
    assert [seen[1:3] for seen in learned] == [
        ((4, 3, 32, 32), (4, 32, 32))
    ] * 3  # 2 in step 0 and 1 in step 1
    assert [seen[3] if seen[3] is None else seen[3].tolist() for seen in learned][:2] == [None, None]
    assert sorted(learned[2][3].tolist()) == [False, False, True, True]
    assert learned[0][4] == (4, 8, 4, 4)
    assert [seen for seen in module.SEEN if seen[0] == "keep"] == [("keep", [0, 1])]
    assert [seen[1] for seen in module.SEEN if seen[0] == "review"] == [8, 4]
    state = checkpoint.load(tmp_path / "runs" / "run" / "step_1.pt")
    assert state["methods"] == {"curious": {"reviewed": 4}}


def test_learn_is_the_mean_over_images_where_the_memory_has_a_loss_of_its_own():
    class WithMemory(Method):
        def memory_loss(self, logits, labels):
            return 10 * super().memory_loss(logits, labels)

    logits, labels = torch.randn(3, 4, 2, 2), torch.randint(4, (3, 2, 2))
    batch = Batch(torch.zeros(3, 3, 2, 2), labels, torch.tensor([False, True, False]))

    class Student:
        pass

    student = Student()
    student.logits = logits
    each = [Method().segmentation_loss(logits[i : i + 1], labels[i : i + 1]) for i in range(3)]
    expected = (each[0] + 10 * each[1] + each[2]) / 3
    assert torch.allclose(WithMemory().learn(student, batch), expected)
