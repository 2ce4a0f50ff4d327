"""Training and scoring go the way of a GPU without operators that differ from run to run, and without a host
that waits. See rehearsal.py for how that is known without one.

What is chosen by name is asked of the registries: whatever is added there is rehearsed too.
"""

import re
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from conftest import mostly_slow
from rehearsal import META, NOT_DETERMINISTIC, Finding, Rehearsal, rehearse, seen, settings

from data.transforms import normalise
from engine.optim import OPTIMIZERS
from methods import AVERAGES, METHODS, PHASES, UPDATES, Update
from methods.base import joined, stretches
from methods.mib import MiB
from models.backbone import BACKBONES
from models.segmenter import Segmenter

MIB, ALTERSGD = settings("mib"), ["phase.name=altersgd", "phase.p=0.5"]
# Scoring counts pixels by bincount, which asks the device for its largest value.
WAITS_IN_SCORING = {"bincount"}
# In fp16 the loss scale is read for the update rule, and found infinities by the method and the scaler.
WAITS_IN_FP16 = {"loop", "gradients_are_finite", "apply_update"}

DONE: dict[tuple[str, ...], Rehearsal] = {}  # of this process, by their overrides


@pytest.fixture
def rehearsed(toy_arguments):
    """Training of two steps with the given overrides; the second has a descent, and an ascent in a phase."""

    def make(*overrides: str, score: bool = False) -> Rehearsal:
        if (*overrides, str(score)) not in DONE:
            few = ("train.epochs=1", "run.log_every=1000", "run.tracker=none", "run.pictures=0")
            # The forms of operators that PyTorch puts in their place would only hide them.
            as_written = "train.deterministic=false"
            arguments = toy_arguments(*few, as_written, *overrides, name=f"run_{len(DONE)}")
            DONE[*overrides, str(score)] = rehearse(arguments, score)
        return DONE[*overrides, str(score)]

    return make


def shown(findings: set[Finding]) -> str:
    return "\n".join(sorted(map(str, findings)))


# ----------------------------------------------------------------------------------------- what is rehearsed


@pytest.mark.parametrize("method", METHODS)
def test_every_method(method, rehearsed):
    found = rehearsed(*settings(method), *ALTERSGD)
    assert not found.findings, shown(found.findings)


@pytest.mark.parametrize("phase", PHASES)
def test_every_phase(phase, rehearsed):
    found = rehearsed(*MIB, f"phase.name={phase}", "phase.p=0.5")
    assert not found.findings, shown(found.findings)


@pytest.mark.parametrize("update", UPDATES)
def test_every_update_rule(update, rehearsed):
    found = rehearsed(*MIB, *ALTERSGD, f"update.name={update}", "update.from_step=1")
    assert not found.findings, shown(found.findings)


@pytest.mark.parametrize("average", AVERAGES)
def test_every_average(average, rehearsed):
    found = rehearsed(*MIB, *ALTERSGD, f"average.name={average}")
    assert not found.findings, shown(found.findings)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer(optimizer, rehearsed):
    found = rehearsed(*MIB, *ALTERSGD, f"optim.name={optimizer}")
    assert not found.findings, shown(found.findings)


@pytest.mark.parametrize("body", mostly_slow(BACKBONES, fast=("resnet18",)))
def test_every_backbone(body, rehearsed):
    found = rehearsed(*MIB, f"model.body={body}", "train.epochs_later=2")
    assert not found.findings, shown(found.findings)


@pytest.mark.parametrize(
    "settings",
    [
        ["model.norm=abn_lean", "method.cross_entropy=valid", "train.channels_last=false"],
        [
            "train.accumulate=2",
            "method.entropy=0.1",
            "model.dropout=0.1",
            "method.also_observe=[ewc, pi, rw]",
        ],
        ["phase.flip=all", "phase.momentum=reset", "phase.batch=same", "phase.weight_decay=signed"],
    ],
    ids=lambda settings: settings[0],
)
def test_other_settings(settings, rehearsed):
    found = rehearsed(*MIB, *ALTERSGD, *settings)
    assert not found.findings, shown(found.findings)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "method"), list(enumerate(METHODS)))
def test_method_phase_and_rule_compose_without_new_operators(number, method, rehearsed):
    """Every method with the phases and the rules in turn: what runs is what runs with each of them alone.
    So those above stand for all triples.
    """
    phase, update = (list(names)[number % len(names)] for names in (PHASES, UPDATES))
    chosen_phase, chosen_update = [f"phase.name={phase}", "phase.p=0.5"], [f"update.name={update}"]
    together = rehearsed(*settings(method), *chosen_phase, *chosen_update)
    assert not together.findings, shown(together.findings)
    alone = [
        rehearsed(*settings(method), *ALTERSGD),
        rehearsed(*MIB, *chosen_phase),
        rehearsed(*MIB, *ALTERSGD, *chosen_update, "update.from_step=1"),
    ]
    assert together.operators <= set.union(*(found.operators for found in alone))


@pytest.mark.parametrize(
    "convention",
    [
        ["data.evaluate=full"],
        ["data.evaluate=crop", "data.evaluate_size=16"],
        ["data.evaluate=slide", "data.evaluate_size=16", "data.evaluate_flip=true"],
        ["data.evaluate_scales=[0.75, 1, 1.5]", "model.pooling=16"],
    ],
    ids=lambda convention: convention[0],
)
def test_scoring(convention, rehearsed):
    found = rehearsed(*MIB, *convention, score=True)
    assert "bincount" in found.operators
    waits = {finding.operator for finding in found.of("waits") if "interpolation" not in finding.where}
    assert waits == WAITS_IN_SCORING, shown(
        found.findings
    )  # beside matrices that are made once for each size
    assert found.findings == found.of("waits"), shown(found.findings)


def test_what_waits_in_fp16_has_a_name(rehearsed):
    found = rehearsed(*MIB, *ALTERSGD, "train.amp=fp16")
    assert found.findings == found.of("waits"), shown(found.findings)
    assert {finding.where.split(", ")[-1] for finding in found.findings} == WAITS_IN_FP16


def test_plain_losses_are_for_those_who_need_second_derivatives(rehearsed):
    """Their nll_loss2d has no deterministic form on a GPU; docs/performance.md says so."""
    found = rehearsed(*MIB, *ALTERSGD, "train.losses=plain")
    names = {finding.operator.split()[0] for finding in found.findings}
    assert names == {"nll_loss2d_forward", "nll_loss2d_backward"}, shown(found.findings)


# ------------------------------------------------------------------------------------ the rehearsal can fail


def test_it_sees_forward_backward_and_update(rehearsed):
    seen_there = rehearsed(*MIB, *ALTERSGD).operators
    assert {"convolution", "convolution_backward", "native_batch_norm_backward", "_fused_sgd"} <= seen_there


def findings_of(rehearsed, change: str) -> set[tuple[str, str, str]]:
    """Kind, operator and file of what is found; `change` keeps the rehearsal apart from all others."""
    found = rehearsed(*MIB, *ALTERSGD, f"run.name={change}")
    return {(f.kind, f.operator.split()[0], f.where.split(":")[0]) for f in found.findings}


def test_cross_entropy_of_pytorch_is_reported(rehearsed, monkeypatch):
    def loss(self, logits, labels):
        return F.cross_entropy(logits.tensor, labels, ignore_index=255)

    monkeypatch.setattr(MiB, "segmentation_loss", loss)
    found = findings_of(rehearsed, "cross_entropy")
    assert ("not deterministic", "nll_loss2d_forward", "methods/base.py") in found
    assert ("not deterministic", "nll_loss2d_backward", "engine/objective.py") in found


@pytest.mark.parametrize(
    ("deterministic", "operators"),
    [
        ("false", {"upsample_bilinear2d", "upsample_bilinear2d_backward"}),
        ("true", {"_unsafe_index_put"}),  # what PyTorch puts in their place
    ],
)
def test_interpolation_of_pytorch_is_reported(deterministic, operators, rehearsed, monkeypatch):
    def enlarged(logits, size):
        return F.interpolate(logits, size=size, mode="bilinear")

    monkeypatch.setattr("models.segmenter.Enlarged", enlarged)
    found = rehearsed(*MIB, f"train.deterministic={deterministic}", "run.name=interpolate")
    assert {f.operator.split()[0] for f in found.of("not deterministic")} == operators


def test_an_index_whose_gradient_adds_up_is_reported(rehearsed, monkeypatch):
    def loss(self, logits, labels):
        return logits.tensor[torch.zeros(4, dtype=torch.long, device=labels.device)].mean()

    monkeypatch.setattr(MiB, "segmentation_loss", loss)
    assert ("not deterministic", "index_put", "engine/objective.py") in findings_of(rehearsed, "index")


def reads_the_loss(self, model, evaluate, weights, scale):
    terms = evaluate(weights)
    return terms if terms["seg"].item() > 0 else {}


def asks_for_the_loss(self, model, evaluate, weights, scale):
    terms = evaluate(weights)
    return terms if terms["seg"] > 0 else {}


def copies_the_loss(self, model, evaluate, weights, scale):
    return {name: term.cpu() for name, term in evaluate(weights).items()}


def cuts_by_a_mask(self, model, evaluate, weights, scale):
    terms = evaluate(weights)
    gradient = next(model.parameters()).grad
    return terms | {"large": gradient[gradient > 1].sum()}


def makes_a_number(self, model, evaluate, weights, scale):
    terms = evaluate(weights)
    return terms | {"two": terms["seg"] * torch.tensor(2.0, device=terms["seg"].device)}


@pytest.mark.parametrize(
    ("rule", "operator"),
    [
        (reads_the_loss, "_local_scalar_dense"),
        (asks_for_the_loss, "_local_scalar_dense"),
        (copies_the_loss, "_to_copy"),
        (cuts_by_a_mask, "index"),
        (makes_a_number, "tensor"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_an_update_rule_that_waits_is_reported(rule, operator, rehearsed, monkeypatch):
    monkeypatch.setattr(Update, "__call__", rule)
    assert findings_of(rehearsed, rule.__name__) == {("waits", operator, "engine/step.py")}


def test_a_tensor_of_the_host_is_reported(rehearsed, monkeypatch):
    forward = Segmenter.forward

    def on_two_devices(self, x, enlarged=True):
        output = forward(self, x, enlarged)
        weights = torch.ones(output.features.shape[-1], 1)  # a product that `meta` itself would let pass
        return output._replace(features=output.features @ weights)

    monkeypatch.setattr(Segmenter, "forward", on_two_devices)
    found = rehearsed(*settings("ilt"), "run.name=two_devices")
    assert {finding.kind for finding in found.findings} == {"two devices"}


WAITING = {
    "bool(x.isfinite().all())": "_local_scalar_dense",
    "torch.add(x, x, alpha=x[0, 0])": "_local_scalar_dense",
    "x[: x[0, 0].long()]": "_local_scalar_dense",
    "F.one_hot(x[0].long())": "_local_scalar_dense",
    "x.tolist()": "_to_copy",
    "torch.zeros(3).to(x)": "_to_copy",
    "x[x > 0]": "index",
    "x.__setitem__(x > 0, x)": "index_put",
    "x.nonzero()": "nonzero",
    "torch.where(x > 0)": "nonzero",
    "x.masked_select(x > 0)": "masked_select",
    "torch.equal(x, x)": "equal",
    "torch.empty_like(x).copy_(torch.zeros(4, 3))": "copy",
    "torch.as_tensor([1.0], device=x.device)": "as_tensor",
    "x.new_tensor([1.0])": "new_tensor",
}
GOING_ON = [
    "torch.zeros(3).to(x.device, non_blocking=True)",
    "x[x[:, 0].long()]",
    "torch.where(x > 0, x, 0.0)",
    "x.masked_fill(x > 0, 0.0)",
    "x.repeat_interleave(2, 0)",
    "torch._foreach_mul([x], x[0, 0])",
    "torch.zeros(3, device=x.device) + torch.ones(())",
    "torch.as_tensor(x)",
    "x.to(torch.float64)",
]


@pytest.mark.parametrize("expression", [*WAITING, *GOING_ON])
def test_what_waits(expression):
    with seen(Rehearsal(may_wait=False)) as rehearsal:
        eval(expression, {"torch": torch, "F": F, "x": torch.empty(4, 3, device=META)})
    found = {finding.operator for finding in rehearsal.of("waits")}
    assert found == ({WAITING[expression]} if expression in WAITING else set())
    with seen(Rehearsal(may_wait=True)) as rehearsal:
        eval(expression, {"torch": torch, "F": F, "x": torch.empty(4, 3, device=META)})
    assert not rehearsal.of("waits")


def test_the_list_is_that_of_pytorch():
    """Another version may know of more."""
    documented = set(re.findall(r"\* :(?:class|func):`([\w.]+)`", torch.use_deterministic_algorithms.__doc__))
    assert len(documented) > 30
    assert documented == NOT_DETERMINISTIC.keys()
    for name in {name for names in NOT_DETERMINISTIC.values() for name in names}:
        assert hasattr(torch.ops.aten, name) or hasattr(torch.ops.aten, f"{name}_"), name


NOT_MEANT = [
    "x.bincount()",
    "x.cumsum(0)",
    "x.double().median()",
    "torch.zeros_like(x).scatter(0, x, 1)",
    "x.double().gather(0, x)",
    "F.pad(x.double()[None], (1, 1), mode='replicate')",
]
MEANT = {
    "x.bincount(x.double())": "bincount",
    "x.double().cumsum(0)": "cumsum",
    "x.double().median(dim=0)": "median",
    "torch.zeros_like(x).scatter(0, x, x)": "scatter",
    "x.double().requires_grad_().gather(0, x).sum().backward()": "scatter_add",
    "F.pad(x.double()[None].requires_grad_(), (1, 1), mode='replicate').sum().backward()": (
        "replication_pad1d_backward"
    ),
}


@pytest.mark.parametrize("expression", [*MEANT, *NOT_MEANT])
def test_only_some_calls_are_not_deterministic(expression):
    with seen(Rehearsal()) as rehearsal:
        eval(expression, {"torch": torch, "F": F, "x": torch.empty(4, dtype=torch.long, device=META)})
    found = {finding.operator.split()[0] for finding in rehearsal.findings}
    assert found == ({MEANT[expression]} if expression in MEANT else set())


# --------------------------------------------------------------------------------- what was found is the same


@pytest.mark.parametrize("flags", list(product([False, True], repeat=4)))
def test_slices_of_a_batch_are_what_an_index_takes(flags):
    x = torch.randn(4, 2, 3, requires_grad=True)
    for kind in (False, True):
        places = stretches(torch.tensor(flags), kind)
        expected = x[torch.tensor(flags) == kind]
        assert bool(places) == (kind in flags)
        if places:
            found = joined(x, places)
            assert torch.equal(found, expected)
            weights = torch.randn_like(found)
            one, other = (torch.autograd.grad((y * weights).sum(), x)[0] for y in (found, expected))
            assert torch.equal(one, other)


def test_images_are_normalised_alike_whoever_asks_first():
    images = torch.randint(256, (2, 3, 4, 4), dtype=torch.uint8)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    with torch.inference_mode():
        scored = normalise(images, torch.float64)
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    (normalise(images, torch.float64) * weight).sum().backward()  # keeps no tensor of inference mode
    torch.testing.assert_close(scored, ((images / 255 - mean) / std).double(), rtol=1e-5, atol=1e-5)
    assert torch.equal(normalise(images, torch.float64), scored)
