"""scripts.benchmark: that its instruments are right, and that every part runs.

The measurements are for quiet machines.
"""

import copy
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from processes import run_ranks
from torch import nn

import train
from configs.identity import short_name
from data import load_dataset, shapes
from data.incremental import train_table
from data.loaders import StepDataset
from data.transforms import normalise, train_transform
from engine.arguments import read_config
from methods import METHODS
from methods.losses import fused
from methods.losses import plain as plain_losses
from metrics.confusion import ConfusionMatrix
from models.norm import ABN
from scripts import benchmark
from scripts.benchmarks import PARTS, evaluation, head, inputs, losses, measure, memory, start_up, training
from scripts.benchmarks.measure import Measurement, Options, Samples, Target
from study.experiments import RELATED_METHODS

MEASUREMENTS = {  # rows of each part with --quick
    "iteration": 2,
    "alternation": 2,
    "updates": len(RELATED_METHODS) + 1,  # and PLOP
    "methods": len(METHODS) - 1,  # all but FT
    "losses": 6,
    "head": 4,
    "threads": 2,
    "labels": 1,
    "loading": 9,
    "index": 2,
    "importance": 3,
    "evaluation": 3,
    "memory": 4,
    "start-up": 3,
    "scaling": 3,
}
SLOW = (
    *("losses", "start-up", "scaling", "alternation", "updates", "methods", "evaluation"),
    *("importance", "memory"),
)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A data set for the parts that read images."""
    root = tmp_path_factory.mktemp("benchmark") / "shapes"
    shapes.generate(root, train=24, val=20, size=96, progress=False)
    return root


# ------------------------------------------------------------------------------------------------ instruments


def test_variants_take_turns_after_the_warm_ups():
    calls = []

    def variant(name: str, seconds: float):
        return lambda: calls.append(name) or seconds

    samples = measure.interleave({"a": variant("a", 2.0), "b": variant("b", 1.0)}, repeats=3, warm_ups=1)
    assert calls == ["a", "b", "a", "b", "b", "a", "a", "b"]
    assert samples == {"a": [2.0] * 3, "b": [1.0] * 3}


def test_a_ratio_is_the_median_of_neighbours_with_their_range():
    samples: Samples = {"a": [2.0, 30.0, 2.2], "b": [1.0, 10.0, 1.0], "c": [0.0] * 3}
    measurement = measure.ratio("a / b", samples, "a", "b", Target(high=2.5))
    assert (measurement.value, measurement.low, measurement.high) == (2.2, 2.0, 3.0)
    assert measurement.raw == {"a": samples["a"], "b": samples["b"]}
    assert measurement.met == "yes" and measurement.measured == "2.2 x (2 - 3)"


@pytest.mark.parametrize(
    ("target", "text", "inside", "outside"),
    [
        (Target(high=1.05), "<= 1.05", 1.05, 1.06),
        (Target(low=4), ">= 4", 4.0, 3.9),
        (Target(0.99, 1.01), "0.99 to 1.01", 1.0, 0.98),
    ],
)
def test_targets(target, text, inside, outside):
    assert str(target) == text
    assert (
        Measurement("", inside, target=target).met == "yes"
        and Measurement("", outside, target=target).met == "NO"
    )
    assert Measurement("", inside).met == "-" and Measurement("", target=target, note="no data").met == "-"


def test_timed_measures_seconds():
    assert 0.02 <= measure.timed(lambda: time.sleep(0.02))() < 1


def test_peak_bytes_of_known_allocations():
    mega = 1_000_000

    def one_after_the_other():
        for _ in range(3):
            torch.empty(mega, dtype=torch.uint8)

    def together():
        return [torch.empty(mega, dtype=torch.uint8) for _ in range(3)]

    def in_backward():
        x = torch.empty(mega // 4, requires_grad=True)
        torch.autograd.grad(x.tanh().sum(), x)  # x, tanh(x), and either grad * (1 - tanh^2) or more beside

    assert measure.peak_bytes(one_after_the_other) == mega
    assert measure.peak_bytes(together) == 3 * mega
    assert 3 * mega <= measure.peak_bytes(in_backward) <= 5 * mega
    assert measure.peak_bytes(lambda: None) == 0


def test_saved_bytes_counts_each_storage_once_and_no_parameters():
    images = torch.zeros(2, 3, 8, 8)
    assert measure.saved_bytes(nn.Conv2d(3, 5, 1), images) == images.nbytes
    two = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Tanh(), nn.Tanh())  # input, tanh, tanh of tanh
    assert measure.saved_bytes(two, images) == 3 * images.nbytes
    with_views = nn.Sequential(
        nn.Conv2d(3, 3, 1), nn.Tanh(), nn.Flatten(2), nn.Unflatten(2, (8, 8)), nn.Conv2d(3, 3, 1)
    )
    assert measure.saved_bytes(with_views, images) == 2 * images.nbytes


def test_the_typed_losses_are_the_shipped_ones():
    logits, teacher, labels = losses.example(2, 16)
    logits, teacher = logits.double().detach().requires_grad_(), teacher.double()
    typed, shipped = losses.VARIANTS["typed"], losses.VARIANTS["plain"]
    assert shipped == (plain_losses.unbiased_cross_entropy, plain_losses.unbiased_distillation)
    for ours, theirs, arguments in (
        (typed[0], shipped[0], (labels, losses.NUM_OLD)),
        (typed[1], shipped[1], (teacher,)),
    ):
        torch.testing.assert_close(ours(logits, *arguments), theirs(logits, *arguments), rtol=0, atol=1e-6)
    gradients = {name: losses.gradient(v, logits, teacher, labels) for name, v in losses.VARIANTS.items()}
    scale = gradients["typed"].abs().max()
    for name in losses.VARIANTS:
        torch.testing.assert_close(gradients[name] / scale, gradients["typed"] / scale, rtol=0, atol=1e-6)


def test_the_head_is_measured_against_the_same_gradient():
    tensors = head.example(2, 6, 64)
    before, now = head.gradient_before(*tensors), head.gradient_now(*tensors)
    torch.testing.assert_close(now / before.abs().max(), before / before.abs().max(), rtol=0, atol=1e-6)
    whole = head.gradient_of_whole(fused, *tensors)
    torch.testing.assert_close(now / before.abs().max(), whole / before.abs().max(), rtol=0, atol=1e-6)


def test_the_pipeline_over_pil_gives_the_images_of_ours(images):
    dataset, crop = load_dataset("voc", images), 48
    table = train_table(inputs.STEP, "disjoint", "background")
    ours = StepDataset(dataset.train, table, train_transform(crop))
    draws = inputs.crops_of(ours)
    assert {draw.flipped for draw in draws} == {True, False}
    for position, (sample, draw) in enumerate(zip(dataset.train, draws, strict=True)):
        image, labels = ours[0, position]
        pil_image, pil_labels = inputs.pil_example(sample, draw, crop, table)
        assert (pil_labels != labels).float().mean() < 0.01  # PIL rounds the places of samples in its own way
        assert (normalise(image[None])[0] - pil_image).abs().mean() < 0.02


@pytest.mark.parametrize("make", [evaluation.random_labels, evaluation.regions])
def test_the_counts_by_image_are_the_confusion_matrix(make):
    truth, guess = make(3, 64, 32)
    matrix = ConfusionMatrix(evaluation.NUM_CLASSES)
    matrix.update(truth, guess)
    assert torch.equal(matrix.counts, torch.from_numpy(evaluation.counts_by_image(truth, guess)))


def test_plain_norms_replace_every_norm_and_keep_more():
    images = torch.randn(2, 3, 32, 32)
    ours, plain = (memory.network("resnet_tiny", "abn") for _ in range(2))
    plain = memory.with_plain_norms(plain)
    assert not [module for module in plain.modules() if isinstance(module, ABN)]
    count = sum(isinstance(module, ABN) for module in ours.modules())
    assert count == sum(isinstance(module, nn.BatchNorm2d) for module in plain.modules()) > 5
    assert measure.saved_bytes(ours, images) < measure.saved_bytes(plain, images)


def test_an_iteration_trains_as_the_phase_says(tmp_path):
    trainee = training.begin(str(tmp_path), "method.name=mib", "phase.name=altersgd", *training.QUICK)
    assert trainee.teacher is not None and trainee.model.num_classes == 21
    labels = trainee.batch[1]
    assert set(labels.unique().tolist()) == {0, 20} and labels.dtype == torch.uint8
    signs = [trainee.phase(training.LATE + i, training.TOTAL).learn for i in range(4)]
    assert sorted(signs) == [-1.0, -1.0, 1.0, 1.0]
    assert training.variant(trainee).phase(training.LATE + 1, training.TOTAL).learn == 1.0
    before = [p.detach().clone() for p in trainee.model.parameters()]
    trainee.iterate()
    assert len(trainee.guard.watched) == 1 and len(trainee.optimizer.state) == len(before)
    trainee.bare()()
    for now, then in zip(trainee.model.parameters(), before, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=1e-5)  # so that no loss runs away


def test_the_optimizer_is_that_of_a_run(toy_arguments, tmp_path, monkeypatch):
    made = []
    optimizer = torch.optim.SGD

    def note(parameters, **settings):
        groups = list(parameters)
        if isinstance(groups[0], dict):  # not when a config is asked what its optimizer can do
            own = [{key: value for key, value in group.items() if key != "params"} for group in groups]
            made.append((settings | {"lr": None}, own))
        return optimizer(groups, **settings)

    monkeypatch.setattr(torch.optim, "SGD", note)
    assert train.main(toy_arguments("method.name=dkd")) == 0
    training.begin(str(tmp_path), "method.name=dkd", *training.QUICK)
    _, shipped, ours = made  # step 0 and step 1 of the run
    assert ours == shipped and ours[0]["momentum"] == 0.9
    assert [group.get("lr_scale", 1.0) for group in ours[1]] == [0.1, 1.0, 1.0]


@pytest.mark.parametrize(
    ("update", "passes"),
    [("plain", 1), ("sam", 2), ("gradient_penalty", 3), ("asam", 2), ("f_sam", 2), ("c_flat", 4)],
)
def test_an_iteration_evaluates_as_often_as_its_update_rule(update, passes, tmp_path):
    trainee = training.variant(
        training.begin(str(tmp_path), "method.name=mib", *training.QUICK), update=update
    )
    counts = {"student": 0, "teacher": 0}
    for name, model in (("student", trainee.model), ("teacher", trainee.teacher)):
        model.register_forward_pre_hook(lambda *_, name=name: counts.update({name: counts[name] + 1}))
    trainee.iterate()
    assert counts == {"student": passes, "teacher": 1} and trainee.update.evaluations == passes


@pytest.mark.slow
def test_the_report_finds_the_time_of_every_related_method():
    """By the names that runs of the shipped overlays have."""
    mib = "configs/methods/mib.yaml"
    arguments = [[mib, f"configs/{overlay}.yaml"] for overlay in RELATED_METHODS] + [
        ["configs/methods/plop.yaml"]
    ]
    names = {short_name(read_config(overlays).model_dump()) for overlays in arguments}
    measured = {measurement.what for measurement in training.updates(Options(quick=True, repeats=1))}
    assert measured == {f"{name} / plain mib" for name in names} and len(names) == 12


def test_the_mean_iteration_of_rw_looks_as_often_as_it_says():
    trainee = SimpleNamespace(method=SimpleNamespace(options=SimpleNamespace(every=10)))
    samples: Samples = {"ft": [1.0], training.LOOK: [3.0], training.BETWEEN: [1.0]}
    assert training.with_looks(samples, trainee)["rw"] == [pytest.approx((3 + 9 * 1) / 10)]
    assert training.with_looks({"ft": [1.0]}, trainee) == {"ft": [1.0]}


def test_looking_or_not_leaves_the_options_of_rw(tmp_path):
    trainee = training.begin(str(tmp_path), "method.name=rw", *training.QUICK)
    times = training.timings("rw", trainee)
    assert list(times) == [training.LOOK, training.BETWEEN]
    before = copy.deepcopy(trainee.method.path)
    times[training.BETWEEN]()
    assert all(torch.equal(before[name], now) for name, now in trainee.method.path.items())
    times[training.LOOK]()
    assert any(not torch.equal(before[name], now) for name, now in trainee.method.path.items())
    assert trainee.method.options.every == 10


def test_times_of_different_batches_are_compared_by_the_image(monkeypatch):
    trainee = SimpleNamespace(iterate=lambda: None, batch=(torch.zeros(8, 3, 2, 2), None))
    monkeypatch.setattr(training, "timed", lambda action: lambda: 4.0)
    assert training.per_image(trainee)() == 0.5


# --------------------------------------------------------------------------------------------------- the tool


def test_every_part_is_known_here():
    assert list(MEASUREMENTS) == list(PARTS)


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=[pytest.mark.slow] if part in SLOW else []) for part in PARTS]
)
def test_every_part_runs(part, images, tmp_path, monkeypatch, capsys):
    # Neither warm-ups, which are measured like the rest, nor processes that import torch once more.
    monkeypatch.setattr(start_up, "interleave", lambda *those, warm_ups: measure.interleave(*those, 0))
    monkeypatch.setattr(torch.multiprocessing, "spawn", lambda f, args, nprocs: run_ranks(f, args, nprocs))
    file = tmp_path / "figures.json"
    arguments = [part, "--quick", "--repeats", "1", "--json", str(file)]
    assert benchmark.main([*arguments, "--voc192", str(images), "--fullres", str(images)]) == 0
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["part", "what", "measured", "target", "met?"]
    assert len(rows) == MEASUREMENTS[part] and all(row.startswith(part) for row in rows)
    entry = json.loads(file.read_text())[part]
    assert entry["command"].startswith(f"python -m scripts.benchmark {part} --quick") and entry["quick"]
    assert entry["torch"] == torch.__version__ and entry["cpu"] and entry["threads"] and entry["date"]
    assert len(entry["figures"]) == MEASUREMENTS[part]
    for measurement in entry["figures"]:
        if measurement["note"]:
            assert measurement["value"] is None
        else:
            assert measurement["value"] > 0 and measurement["raw"]
            assert all(s > 0 for samples in measurement["raw"].values() for s in samples)


def test_measurements_are_merged_by_part(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(memory, "synchronised_bytes", lambda *_: 1.0)  # without its two processes
    file = tmp_path / "new" / "figures.json"
    for part in ("labels", "memory", "labels"):
        assert benchmark.main([part, "--quick", "--repeats", "1", "--json", str(file)]) == 0
    assert list(json.loads(file.read_text())) == ["labels", "memory"]


@pytest.mark.parametrize(("part", "option"), [("loading", "--fullres"), ("index", "--voc192")])
def test_a_part_without_its_images_is_skipped_and_says_why(part, option, tmp_path, capsys):
    file = tmp_path / "figures.json"
    assert benchmark.main([part, "labels", "--quick", "--json", str(file)]) == 0
    _, _, skipped, measured = capsys.readouterr().out.splitlines()
    assert skipped.startswith(part) and f"skipped: needs {option} FOLDER" in skipped
    assert measured.startswith("labels")
    assert list(json.loads(file.read_text())) == ["labels"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["lossses"], "no part 'lossses'; choose from iteration, alternation, updates"),
        (["labels", "--repeats", "0"], "--repeats: 0 is less than 1"),
        (["loading", "--fullres", "/nowhere"], "--fullres: /nowhere is not a folder"),
        (["labels", "--json", __file__], "holds something else"),
    ],
)
def test_mistakes_are_said_before_anything_is_measured(arguments, problem, capsys):
    with pytest.raises(SystemExit) as stopped:
        benchmark.main(arguments)
    assert stopped.value.code == 2
    assert problem in capsys.readouterr().err


def test_a_folder_without_the_data_set_is_an_error(tmp_path, capsys):
    assert benchmark.main(["index", "--voc192", str(tmp_path)]) == 2
    assert "PASCAL VOC 2012 is not below" in capsys.readouterr().err


def test_options_know_how_often():
    assert Options().times(7) == 7 and Options(quick=True).times(7) == 2
    assert Options(quick=True, repeats=5).times(7) == 5


def test_the_documents_show_the_committed_measurements(capsys):
    root = Path(benchmark.__file__).parent.parent
    assert benchmark.main(["--show", str(root / "results/benchmark.json")]) == 0
    text = (root / "docs/performance.md").read_text(encoding="utf-8")
    shown = text.partition("<!-- benchmark -->\n")[2].partition("<!-- /benchmark -->")[0]
    assert shown == capsys.readouterr().out


def test_showing_what_is_not_there_is_an_error(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        benchmark.main(["--show", str(tmp_path / "none.json")])
    assert stopped.value.code == 2 and "--json" in capsys.readouterr().err
