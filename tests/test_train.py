"""The run as a whole, on three classes in 32-pixel images."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import Killed, mostly_slow, walk_until
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_resume import assert_same_statistics

import train
from data.incremental import draw_class
from data.protocols import PROTOCOLS
from engine import checkpoint
from engine.arguments import read_config
from engine.optim import make_schedule, set_learning_rate
from engine.ranks import StopRequest, start_ranks
from engine.run import prepare
from engine.step import step_loader
from methods import METHODS, PHASES
from methods.importance import ImportanceMethod

ROOT = Path(train.__file__).parent


def weights_of(folder: Path, step: int = 1) -> dict[str, torch.Tensor]:
    return checkpoint.load(folder / f"step_{step}.pt")["model"]


def assert_same_bits(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different, different


@pytest.mark.figures
@pytest.mark.parametrize("phase", sorted(PHASES))
def test_every_phase_is_drawn(phase, toy_arguments, tmp_path, capsys):
    assert train.main(toy_arguments("method.name=mib", f"phase.name={phase}", "phase.p=0.5")) == 0
    assert "cannot be drawn" not in capsys.readouterr().err
    events = EventAccumulator(str(tmp_path / "runs/run"), size_guidance={"images": 0}).Reload()
    losses = events.Images("2 losses and images/2 losses, the phase shaded")
    assert [event.step for event in losses] == [4, 6 if phase == "stop" else 8]


PAIRS = [(method, phase) for method in sorted(METHODS) for phase in sorted(PHASES)]


@pytest.mark.parametrize(
    "pair", mostly_slow(PAIRS, fast=[("mib", "altersgd"), ("rw", "consolidate")]), ids="-".join
)
def test_every_method_runs_under_every_phase(pair, toy_arguments, tmp_path):
    method, phase = pair
    memory = 4 if METHODS[method].memory else 0
    arguments = toy_arguments(
        f"method.name={method}", f"phase.name={phase}", "phase.p=0.5", f"method.memory={memory}"
    )
    assert train.main(arguments) == 0
    results = json.loads((tmp_path / "runs/run/results.json").read_text())
    assert [s["step"] for s in results["steps"]] == [0, 1]
    assert all(v is None or 0 <= v <= 1 for s in results["steps"] for v in s["iou"].values())
    state = checkpoint.load(tmp_path / "runs/run/step_1.pt")
    assert all(t.isfinite().all() for t in state["model"].values())
    instance = METHODS[method]()
    if instance.state_dict():
        instance.load_state_dict(state["methods"][method])
        assert str(instance.handover()) == str({method: state["methods"][method]})
        if isinstance(instance, ImportanceMethod):
            assert set(instance.omega) == {name for name, _ in _parameters(tmp_path / "runs/run/step_1.pt")}
    else:
        assert state["methods"] == {}


def _parameters(path):
    return checkpoint.load_segmenter(path)[0].named_parameters()


@pytest.mark.slow
def test_results_hold_what_a_reader_needs(toy_arguments, tmp_path):
    assert train.main(toy_arguments("method.name=mib")) == 0
    folder = tmp_path / "runs/run"
    results = json.loads((folder / "results.json").read_text())
    assert results["config"]["method"] == {
        "name": "mib",
        "strength": 10.0,
        "cross_entropy": "all",
        "entropy": 0.0,
        "options": {},
        "also_observe": [],
        "memory": 0,
    }
    assert {"torch", "python", "device", "world_size", "commit"} <= results["environment"].keys()
    last = results["steps"][1]
    assert last["classes"] == ["background", "aeroplane", "bicycle", "bird"] == list(last["iou"])
    plain, background = last["miou"], last["miou_with_background"]
    iou = last["iou"]
    assert plain["old"] == pytest.approx((iou["aeroplane"] + iou["bicycle"]) / 2)
    assert plain["new"] == background["new"] == pytest.approx(iou["bird"])
    assert background["all"] == pytest.approx(sum(iou.values()) / 4)
    first = results["steps"][0]["iou"]
    assert last["forgetting"]["aeroplane"] == pytest.approx(first["aeroplane"] - iou["aeroplane"])
    assert last["images"] == 4 and last["seconds"] > 0 and last["iterations"] == 4
    assert (folder / "config.yaml").exists() and list(folder.glob("events.*"))


@pytest.mark.slow
def test_same_seed_same_bits_and_another_seed_others(toy_arguments, tmp_path):
    common = ("method.name=mib", "phase.name=altersgd", "phase.p=0.5")
    for name, extra in {
        "a": (),
        "b": ("data.workers=1",),
        "c": ("data.workers=2",),
        "d": ("train.seed=7",),
    }.items():
        assert train.main(toy_arguments(*common, *extra, name=name)) == 0
    runs = {name: weights_of(tmp_path / "runs" / name) for name in "abcd"}
    assert_same_bits(runs["a"], runs["b"])
    assert_same_bits(runs["a"], runs["c"])
    assert not torch.equal(runs["a"]["body.conv1.weight"], runs["d"]["body.conv1.weight"])


@pytest.mark.slow
def test_altersgd_with_p_1_is_descent_bit_for_bit(toy_arguments, tmp_path):
    for name, extra in {
        "plain": ("phase.name=descent",),
        "alter": ("phase.name=altersgd", "phase.p=1"),
    }.items():
        assert train.main(toy_arguments("method.name=mib", *extra, name=name)) == 0
    assert_same_bits(weights_of(tmp_path / "runs/plain"), weights_of(tmp_path / "runs/alter"))


@pytest.mark.slow
def test_altersgd_with_p_half_differs_from_descent_from_step_1_on(toy_arguments, tmp_path):
    for name, extra in {
        "plain": ("phase.name=descent",),
        "alter": ("phase.name=altersgd", "phase.p=0.5"),
    }.items():
        assert train.main(toy_arguments("method.name=mib", *extra, name=name)) == 0
    assert_same_bits(weights_of(tmp_path / "runs/plain", 0), weights_of(tmp_path / "runs/alter", 0))
    one, other = weights_of(tmp_path / "runs/plain"), weights_of(tmp_path / "runs/alter")
    assert not torch.equal(one["body.conv1.weight"], other["body.conv1.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mib", "ewc"])
def test_starting_from_a_given_step_0_equals_one_unbroken_run(method, toy_arguments, tmp_path):
    choose = f"method.name={method}"
    assert train.main(toy_arguments(choose, name="whole")) == 0
    assert train.main(toy_arguments(choose, "train.last_step=0", name="first")) == 0
    start = f"train.start_from={tmp_path}/runs/first/step_0.pt"
    assert train.main(toy_arguments(choose, start, name="rest")) == 0
    assert_same_bits(weights_of(tmp_path / "runs/whole"), weights_of(tmp_path / "runs/rest"))
    whole, rest = (json.loads((tmp_path / f"runs/{n}/results.json").read_text()) for n in ("whole", "rest"))
    for a, b in zip(whole["steps"], rest["steps"], strict=True):
        assert a["iou"] == b["iou"] and a["forgetting"] == b["forgetting"]


def test_importance_methods_need_their_own_step_0(toy_arguments, tmp_path, capsys):
    assert train.main(toy_arguments("method.name=ft", "train.last_step=0", name="first")) == 0
    start = f"train.start_from={tmp_path}/runs/first/step_0.pt"
    assert train.main(toy_arguments("method.name=ewc", start, name="rest")) == 2
    assert "no statistics of 'ewc'" in capsys.readouterr().err


@pytest.mark.slow
def test_evaluate_only_scores_again_and_trains_nothing(toy_arguments, toy_run):
    folder = toy_run("method.name=mib")
    before = {p: p.stat().st_mtime_ns for p in folder.glob("step_*.pt")}
    scores = json.loads((folder / "results.json").read_text())["steps"]
    again = toy_arguments(
        "method.name=mib", "train.evaluate_only=true", "data.evaluate=slide", "data.evaluate_size=16"
    )
    assert train.main(again) == 0
    assert before == {p: p.stat().st_mtime_ns for p in folder.glob("step_*.pt")}
    results = json.loads((folder / "results.json").read_text())
    assert results["steps"] == scores
    assert results["evaluations"]["slide_size=16"]["steps"][1]["iou"] != scores[1]["iou"]


def test_evaluate_only_without_a_model_says_what_is_missing(toy_arguments, capsys):
    assert train.main(toy_arguments("train.evaluate_only=true")) == 2
    assert "step_0.pt is missing" in capsys.readouterr().err


def test_a_finished_run_is_not_trained_again(toy_arguments, toy_run, capsys):
    file = toy_run("method.name=mib") / "step_1.pt"
    stamp = file.stat().st_mtime_ns
    assert "nothing was trained" not in capsys.readouterr().out
    assert train.main(toy_arguments("method.name=mib")) == 0
    assert file.stat().st_mtime_ns == stamp
    assert "nothing was trained" in capsys.readouterr().out
    file.unlink()
    assert train.main(toy_arguments("method.name=mib")) == 0
    assert "nothing was trained" not in capsys.readouterr().out


@pytest.mark.slow
def test_another_config_in_the_same_folder_is_refused_unless_forced(toy_arguments, capsys):
    assert train.main(toy_arguments("train.last_step=0")) == 0
    assert train.main(toy_arguments("optim.lr_later=0.03")) == 2
    assert "optim.lr_later: 0.02 -> 0.03" in capsys.readouterr().err
    assert train.main(toy_arguments("optim.lr_later=0.03", "run.force=true")) == 0


@pytest.mark.slow
@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_mixed_precision_stays_close_to_full(amp, toy_arguments, tmp_path):
    if amp == "fp16" and not torch.cuda.is_available():
        pytest.skip("fp16 with a gradient scaler needs a GPU")
    assert train.main(toy_arguments("method.name=mib", name="full")) == 0
    assert train.main(toy_arguments("method.name=mib", f"train.amp={amp}", name="mixed")) == 0
    full, mixed = weights_of(tmp_path / "runs/full"), weights_of(tmp_path / "runs/mixed")
    assert all(t.isfinite().all() and t.dtype == full[name].dtype for name, t in mixed.items())
    one, other = full["body.conv1.weight"], mixed["body.conv1.weight"]
    assert 0 < (one - other).norm() < 0.3 * one.norm()


def assert_close(a: dict, b: dict, tolerance: float) -> None:
    worst = max((a[name] - b[name]).abs().max().item() for name in a)
    assert worst < tolerance


@pytest.mark.slow
def test_memory_format_does_not_change_the_result(toy_arguments, tmp_path, double_precision):
    assert train.main(toy_arguments("train.last_step=0", name="a")) == 0
    assert train.main(toy_arguments("train.last_step=0", "train.channels_last=false", name="b")) == 0
    assert_close(weights_of(tmp_path / "runs/a", 0), weights_of(tmp_path / "runs/b", 0), 1e-9)


@pytest.mark.slow
def test_accumulated_gradients_are_those_of_the_whole_batch(
    toy_arguments, tmp_path, monkeypatch, double_precision
):
    """With the norms in eval mode a batch may be cut without any change, up to rounding."""
    monkeypatch.setattr(torch.nn.Module, "train", lambda self, mode=True: _set_mode(self, False))
    for name, parts in {"whole": 1, "cut": 2}.items():
        assert train.main(toy_arguments("train.last_step=0", f"train.accumulate={parts}", name=name)) == 0
    assert_close(weights_of(tmp_path / "runs/whole", 0), weights_of(tmp_path / "runs/cut", 0), 1e-12)


def _set_mode(module, mode):
    for part in module.modules():
        part.training = mode
    return module


@pytest.mark.slow
def test_compiled_losses_give_the_same_run(toy_arguments, tmp_path, double_precision):
    assert train.main(toy_arguments("method.name=mib", name="eager")) == 0
    assert train.main(toy_arguments("method.name=mib", "train.losses=compiled", name="compiled")) == 0
    assert_close(weights_of(tmp_path / "runs/eager"), weights_of(tmp_path / "runs/compiled"), 1e-9)


@pytest.mark.slow
def test_fine_tuning_forgets_and_distillation_keeps(toy_arguments, tmp_path):
    """The point of it all, in miniature: the same step 0, the same later images, only the method differs."""
    long = ("train.seed=1", "train.epochs=60", "train.epochs_later=40")  # 0.4 apart, however one rounds
    assert train.main(toy_arguments(*long, "train.last_step=0", name="first")) == 0
    start = f"train.start_from={tmp_path}/runs/first/step_0.pt"
    final = {}
    for method in ("ft", "mib"):
        choice = (f"method.name={method}", "method.strength=100")
        assert train.main(toy_arguments(*long, *choice, start, name=method)) == 0
        final[method] = json.loads((tmp_path / f"runs/{method}/results.json").read_text())["steps"]
    assert final["ft"][0]["miou"]["old"] > 0.3
    assert final["mib"][1]["miou"]["old"] > final["ft"][1]["miou"]["old"] + 0.1


@pytest.mark.slow
def test_ade_runs_end_to_end_and_never_scores_its_void(toy_voc, toy_arguments, tmp_path):
    """ADE's 0 means "none of the 150": it is trained as background and left out of every metric."""
    ade = tmp_path / "ADEChallengeData2016"
    for split, names in {"training": "train_aug_*", "validation": "val_*"}.items():
        for folder, source in {"images": "JPEGImages", "annotations": "SegmentationClassAug"}.items():
            (ade / folder / split).mkdir(parents=True)
            for path in (toy_voc / source).glob(names):
                (ade / folder / split / path.name).write_bytes(path.read_bytes())
    assert train.main(toy_arguments("data.dataset=ade", f"data.root={ade}", "method.name=mib")) == 0
    last = json.loads((tmp_path / "runs/run/results.json").read_text())["steps"][1]
    assert last["classes"] == ["background", "wall", "building", "sky"]
    assert sum(last["confusion"][0]) == 0 < sum(last["confusion"][1])


def test_config_errors_come_all_at_once_with_exit_code_2(capsys):
    code = train.main(
        ["optim.lrr=1", "method.name=mibb", "model.body=resnet100", "data.protocol=15-2", "train.seed=1.5"]
    )
    errors = capsys.readouterr().err
    assert code == 2
    for words in (
        "optim.lrr",
        "did you mean optim.lr",
        "mibb",
        "did you mean mib",
        "resnet101",
        "15-2",
        "train.seed",
    ):
        assert words in errors
    assert "Traceback" not in errors


def test_unknown_method_option_is_a_config_error(capsys):
    assert train.main(["method.name=ewc", "method.options.dekay=0.5"]) == 2
    assert "it has: decay" in capsys.readouterr().err


def test_a_methods_file_without_its_name_is_pointed_out(capsys):
    for name, is_there in {"importance": True, "importancee": False, "../train": False}.items():
        assert train.main([f"method.name={name}"]) == 2
        message = capsys.readouterr().err
        assert f"{name!r} is not one of" in message
        assert (f"methods/{name}.py exists but registers no such name" in message) == is_there


@pytest.mark.parametrize(
    ("hook", "returned", "words"),
    [
        ("segmentation_loss", torch.ones(2, 3), "segmentation_loss is a tensor of shape (2, 3)"),
        ("segmentation_loss", 0.5, "segmentation_loss is of type float"),
        ("retention_losses", torch.tensor(1.0), "retention_losses is a tensor of shape ()"),
        ("retention_losses", None, "retention_losses is of type NoneType"),
        ("retention_losses", {"kd": torch.ones(4)}, "retention_losses['kd'] is a tensor of shape (4,)"),
        ("retention_losses", {"kd": 0}, "retention_losses['kd'] is of type int"),
    ],
)
@pytest.mark.slow
def test_losses_of_another_shape_are_refused(
    hook, returned, words, toy_arguments, toy_run, monkeypatch, capsys
):
    start = toy_run("method.name=ft", name="first") / "step_0.pt"
    monkeypatch.setattr(METHODS["mib"], hook, lambda *_: returned)
    assert train.main(toy_arguments("method.name=mib", f"train.start_from={start}", name="rest")) == 2
    lines = capsys.readouterr().err.splitlines()  # those of a progress bar too
    assert any(line.startswith(f"error: method 'mib': {words}, but must be a ") for line in lines)
    assert "Traceback" not in "".join(lines)


def test_missing_data_root_is_explained(capsys):
    assert train.main(["configs/voc/15-1.yaml", "train.device=cpu"]) == 2
    assert "data.root" in capsys.readouterr().err


def test_a_batch_larger_than_a_step_is_refused_before_training(toy_arguments, tmp_path, capsys):
    assert train.main(toy_arguments("train.batch_size=8")) == 2
    message = capsys.readouterr().err
    assert "step 1" in message and "train.batch_size" in message
    assert not (tmp_path / "runs/run/step_0.pt").exists()


@pytest.mark.slow
def test_help_lists_every_choice():
    text = subprocess.run(
        [sys.executable, "train.py", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for word in (
        *METHODS,
        *PHASES,
        "15-1",
        "100-50",
        "resnet101",
        "mobilenet_v2",
        "optim.lr_later" and "lr_later",
    ):
        assert word in text


@pytest.mark.slow
def test_results_tell_the_instructions_that_rounding_depends_on():
    tell = "import torch, engine.results as r; print(r.environment(torch.device('cpu'), 1)['instructions'])"
    command = [sys.executable, "-c", tell]
    limited = os.environ | {"ATEN_CPU_CAPABILITY": "default"}
    told = subprocess.run(command, cwd=ROOT, env=limited, capture_output=True, text=True, check=True).stdout
    assert told == "DEFAULT\n"


def test_published_strengths():
    expected = {"lwf": 100, "lwf_mc": 10, "ilt": 100, "ewc": 500, "rw": 100, "pi": 500, "mib": 10, "ft": 0}
    expected["plop"] = 0.01
    for name, strength in expected.items():
        config = read_config(["configs/voc/15-5.yaml", f"configs/methods/{name}.yaml"])
        assert config.method.strength == strength
    mib = ["configs/voc/15-1.yaml", "configs/methods/mib.yaml"]
    assert read_config(mib).method.strength == 100
    assert read_config([*mib, "method.strength=3"]).method.strength == 3


def test_learning_rate_is_poly_from_its_full_value_on():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.01)
    schedule = make_schedule(read_config([]).optim)
    learning_rates = [set_learning_rate(optimizer, schedule, t, 10) for t in (1, 6, 10)]
    assert learning_rates == pytest.approx([0.01, 0.01 * 0.5**0.9, 0.01 * 0.1**0.9])
    assert optimizer.param_groups[0]["lr"] == learning_rates[-1] and math.isfinite(learning_rates[-1])


@pytest.mark.slow
def test_one_step_0_serves_every_method(toy_arguments, tmp_path):
    """Weights and statistics gathered in one pass give the run that its own step 0 would have given, to the
    last bit."""
    observed = ("train.last_step=0", "method.also_observe=[ewc,pi,rw]")
    assert train.main(toy_arguments("method.name=ft", *observed, name="first")) == 0
    start = f"train.start_from={tmp_path}/runs/first/step_0.pt"
    for method in ("mib", "ewc", "pi", "rw"):
        for name, extra in (("own", ()), ("shared", (start,))):
            assert train.main(toy_arguments(f"method.name={method}", *extra, name=f"{method}-{name}")) == 0
        own, shared = (weights_of(tmp_path / f"runs/{method}-{name}") for name in ("own", "shared"))
        assert all(torch.equal(own[key], shared[key]) for key in own), method


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["method.also_observe=[mib]"], "'mib' is not one of ewc, pi, rw"),
        (["method.name=lwf_mc", "method.also_observe=[ewc]"], "objective of its own"),
    ],
)
def test_observers_that_cannot_observe(toy_arguments, capsys, arguments, message):
    assert train.main(toy_arguments(*arguments)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_fused_losses_give_the_same_run(toy_arguments, tmp_path, double_precision):
    for losses in ("plain", "fused"):
        assert train.main(toy_arguments("method.name=mib", f"train.losses={losses}", name=losses)) == 0
    assert_close(weights_of(tmp_path / "runs/plain"), weights_of(tmp_path / "runs/fused"), 1e-9)


# The readings of AlterSGD and their controls ----------------------------------------------------------------

BY_EPOCH = ("phase.name=altersgd", "phase.flip=all", "phase.every=epoch")
TOTAL, EPOCH = 8, 2  # iterations of step 1 below


@pytest.fixture
def step_1_arguments(toy_arguments, toy_run):
    """Arguments for a run that starts from a step 0 which is the same for all and all methods."""
    common = ("train.batch_size=2",)
    observed = ("method.name=ft", "train.last_step=0", "method.also_observe=[ewc, pi, rw]")
    start = f"train.start_from={toy_run(*common, *observed, name='first')}/step_0.pt"

    def arguments(name: str, *overrides: str) -> list[str]:
        return toy_arguments(*common, start, *overrides, name=name)

    return arguments


@pytest.fixture
def step_1(step_1_arguments, tmp_path):
    """Trains step 1 with the given overrides; returns the folder."""

    def run(name: str, *overrides: str) -> Path:
        assert train.main(step_1_arguments(name, *overrides)) == 0
        return tmp_path / "runs" / name

    return run


def parameters_and_buffers(folder: Path) -> tuple[dict, dict]:
    model, _ = checkpoint.load_segmenter(folder / "step_1.pt")
    return dict(model.named_parameters()), dict(model.named_buffers())


def costs_of(folder: Path) -> tuple[int, int]:
    last = json.loads((folder / "results.json").read_text())["steps"][1]
    return last["iterations"], last["gradient_evaluations"]


@pytest.fixture
def watched(monkeypatch) -> list[tuple[float, float, torch.Tensor]]:
    """(learn, keep, labels) of each update of MiB."""
    seen: list[tuple[float, float, torch.Tensor]] = []
    labels_of = []

    def segmentation_loss(self, logits, labels):
        labels_of.append(labels)
        return original(self, logits, labels)

    def after_backward(self, model, weights, learning_rate):
        seen.append((weights.learn, weights.keep, labels_of[-1]))
        return {}

    original = METHODS["mib"].segmentation_loss
    monkeypatch.setattr(METHODS["mib"], "segmentation_loss", segmentation_loss)
    monkeypatch.setattr(METHODS["mib"], "after_backward", after_backward)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("phase.p=0.25", "phase.flip=all", "phase.every=epoch"), "++ ++ -- ++"),
        (("phase.p=0.25", "phase.every=epoch"), "++ ++ -- ++"),
        (("phase.p=0.25", "phase.flip=all", "phase.every=3"), "++ +++ ---"),
        (("phase.p=0.3", "phase.flip=all"), "++ + - + - + -"),
    ],
)
def test_a_run_follows_its_reading(options, expected, step_1, watched):
    step_1("alter", "method.name=mib", "phase.name=altersgd", "phase.lambda_b=7", *options)
    of_r = {"+": 10.0, "-": -7.0 if "phase.flip=all" in options else 7.0}
    wanted = [({"+": 1.0, "-": -1.0}[sign], of_r[sign]) for sign in expected.replace(" ", "")]
    assert [(learn, keep) for learn, keep, _ in watched] == wanted


@pytest.mark.slow
def test_an_epoch_of_ascent_may_take_the_images_of_its_descent(step_1, watched):
    step_1("alter", "method.name=mib", *BY_EPOCH, "phase.p=0.25", "phase.batch=same")
    labels = [labels for _, _, labels in watched]
    assert [torch.equal(labels[t], labels[t - EPOCH]) for t in range(EPOCH, TOTAL)] == [False] * 2 + [
        True
    ] * 2 + [False] * 2


CASES = {
    "plain": ("method.name=mib",),
    "sam": ("method.name=mib", "update.name=sam"),
    "ewc": ("method.name=ewc",),
    "accumulate": ("method.name=mib", "train.accumulate=2", "train.batch_size=4", "train.epochs_later=8"),
}


@pytest.mark.slow
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_pause_keeps_the_weights_of_stop_and_moves_the_norms_alone(options, step_1):
    pause, stop = (step_1(name, f"phase.name={name}", "phase.p=0.7", *options) for name in ("pause", "stop"))
    (weights, statistics), (stopped, before) = map(parameters_and_buffers, (pause, stop))
    assert_same_bits(weights, stopped)
    names = [name for name in statistics if "running" in name]
    assert names and not any(torch.equal(statistics[name], before[name]) for name in names)
    left = [checkpoint.load(folder / "step_1.pt")["methods"] for folder in (pause, stop)]
    assert_same_statistics(*left)
    evaluations = 5 * (2 if "update.name=sam" in options else 1)  # floor(0.7 * 8)
    assert costs_of(pause) == (TOTAL, evaluations) and costs_of(stop) == (5, evaluations)


@pytest.mark.slow
def test_a_pause_passes_the_images_that_training_would_have_seen(step_1, step_1_arguments):
    options = ("method.name=mib", "phase.p=0.7")
    pause, stop = (step_1(name, f"phase.name={name}", *options) for name in ("pause", "stop"))
    config = read_config(step_1_arguments("pause", "phase.name=pause", *options))
    run = prepare(config, start_ranks("cpu"), StopRequest())
    model = run.place.arrange(checkpoint.load_segmenter(stop / "step_1.pt")[0]).train()
    with torch.no_grad():
        for images, _ in step_loader(run, run.steps[1], iterations=range(6, TOTAL + 1), batch_of=lambda t: t):
            model(run.place.images(images))
    run.folder.unlock()
    assert_same_bits(model.state_dict(), weights_of(pause))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mib", "ewc"])
def test_stop_is_descent_until_the_boundary(method, step_1, step_1_arguments, tmp_path):
    stop = step_1("stop", f"method.name={method}", "phase.name=stop", "phase.p=0.7")
    with pytest.raises(Killed):
        walk_until(
            step_1_arguments("descent", f"method.name={method}", "run.checkpoint_every=5"), 5, kill=True
        )
    state = checkpoint.load(tmp_path / "runs/descent/resume.pt")
    assert (state["position"]["step"], state["position"]["iteration"]) == (1, 5)
    assert_same_bits(state["parts"]["model"], weights_of(stop))


@pytest.mark.slow
def test_nothing_is_added_to_gradients_that_are_not_there(step_1, monkeypatch):
    calls = []
    original = METHODS["ewc"].after_backward

    def after_backward(self, model, weights, learning_rate):
        assert all(p.grad is not None for p in model.parameters())
        calls.append((weights.learn, weights.keep))
        return original(self, model, weights, learning_rate)

    monkeypatch.setattr(METHODS["ewc"], "after_backward", after_backward)
    step_1("pause", "method.name=ewc", "phase.name=pause", "phase.p=0.5")
    assert calls == [(1.0, 10.0)] * 4


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mib", "rw"])
def test_a_step_that_ends_before_it_begins_hands_on_the_model_it_was_given(method, step_1, tmp_path):
    stop, pause = (
        step_1(name, f"method.name={method}", f"phase.name={name}", "phase.p=0") for name in ("stop", "pause")
    )
    assert costs_of(stop) == (0, 0) and costs_of(pause) == (TOTAL, 0)
    before, after = weights_of(tmp_path / "runs/first", 0), weights_of(stop)
    bodies = [name for name in before if name.startswith("body.")]
    assert bodies and all(torch.equal(before[name], after[name]) for name in bodies)
    assert_same_bits(parameters_and_buffers(stop)[0], parameters_and_buffers(pause)[0])


@pytest.mark.slow
def test_p_1_is_descent_bit_for_bit_in_the_other_readings_and_their_controls(step_1):
    plain = weights_of(step_1("plain", "method.name=mib"))
    others = {"by-epoch": BY_EPOCH, "pause": ("phase.name=pause",), "stop": ("phase.name=stop",)}
    for name, phase in others.items():
        assert_same_bits(plain, weights_of(step_1(name, "method.name=mib", *phase, "phase.p=1")))


@pytest.mark.parametrize(
    ("options", "is_said"),
    [
        (("phase.p=0.5", "phase.every=epoch"), True),  # two of four epochs are left
        (("phase.p=0", "phase.every=epoch"), True),
        (("phase.p=0.25", "phase.every=epoch"), False),  # three
        (("phase.p=0.75", "phase.every=epoch"), False),
        (("phase.p=1", "phase.every=epoch"), False),
        (("phase.p=0.25", "phase.every=3"), True),  # 2 + 3 + 3
        (("phase.p=0.5", "phase.every=3"), True),  # 4 + 3 + 1
        (("phase.p=0.5", "phase.every=4"), False),
        (("phase.p=0.5",), False),
        (("phase.p=0.5", "phase.every=1"), False),
        (("phase.p=0.5", "phase.every=epoch", "phase.name=pause"), False),
        (("phase.p=0.5", "phase.every=epoch", "phase.name=consolidate", "phase.flip=seg"), False),
        (("phase.p=0.5", "phase.every=epoch", "phase.name=descent"), False),
        (("phase.p=0.5", "phase.every=epoch", "phase.from_step=2"), False),
    ],
)
def test_a_run_whose_steps_end_on_an_ascent_says_so(options, is_said, toy_arguments, capsys):
    arguments = toy_arguments("train.batch_size=2", "phase.name=altersgd", "phase.flip=all", *options)
    prepare(read_config(arguments), start_ranks("cpu"), StopRequest()).folder.unlock()
    said = capsys.readouterr().out
    assert ("a step ends on an ascent; another p ends on a descent" in said) == is_said
    if is_said:
        p, every = (option.split("=")[1] for option in options)
        assert f"note: with phase.p={p} and phase.every={every} a step" in said


def test_a_partitioned_run_trains_on_each_image_once(toy_arguments, tmp_path, capsys):
    options = ("data.mode=partitioned", "train.epochs=1", "train.epochs_later=1", "train.batch_size=2")
    mixed = {
        "train_aug_009": frozenset({1, 3}),
        "train_aug_011": frozenset({2, 3}),
    }  # the rest show but one step's
    seed = next(s for s in range(99) if 3 not in [draw_class(c, name, s) for name, c in mixed.items()])
    assert train.main(toy_arguments(*options, f"data.split_seed={seed}")) == 0
    results = json.loads((tmp_path / "runs/run/results.json").read_text())
    assert [step["images"] for step in results["steps"]] == [10, 2]
    assert train.main(toy_arguments(*options, f"data.split_seed={seed + 1}")) == 2
    assert f"data.split_seed: {seed} -> {seed + 1}" in capsys.readouterr().err


def test_a_run_learns_the_classes_in_the_order_that_is_given(toy_arguments, tmp_path, monkeypatch):
    monkeypatch.setitem(PROTOCOLS["voc"], "toy", ((1, 2), (3,)))
    options = ("data.steps=null", "data.protocol=toy", "data.order=[3, bicycle, 1]")
    assert train.main(toy_arguments(*options, "data.mode=overlapped", "train.batch_size=2")) == 0
    results = json.loads((tmp_path / "runs/run/results.json").read_text())
    assert results["protocol"] == [[3, 2], [1]]
    assert checkpoint.load(tmp_path / "runs/run/step_1.pt")["class_ids"] == [0, 3, 2, 1]


@pytest.mark.parametrize("method", ["ssul", "dkd"])
def test_the_recipe_of_another_lineage_trains(method, toy_arguments, tmp_path):
    """The overlay itself, but for what makes it large."""
    recipe = ROOT / "configs/recipes" / f"{method}.yaml"
    small = toy_arguments("data.augment=scale_crop", f"method.name={method}", "train.amp=off")
    small += ["data.evaluate=full", "model.body=resnet_tiny", "train.epochs=1", "train.epochs_later=1"]
    assert train.main([str(recipe), *small]) == 0
    results = json.loads((tmp_path / "runs/run/results.json").read_text())
    assert results["config"]["model"]["head"] == "aspp" and len(results["steps"]) == 2
