"""EMA and SWA: a step hands over an average over its iterations."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from conftest import walk_until
from processes import free_port, run_ranks
from test_averages import SHORT, THREE, network, saved
from test_distributed import train_rank
from test_resume import stop_and_go
from toys import STEPS

import engine.step
import train
from configs.identity import run_name, short_name
from engine import checkpoint
from engine.arguments import read_config
from engine.averaging import recompute_statistics
from engine.identity import trained_with
from engine.objective import AMP_DTYPES, Placement
from engine.ranks import StoppedBySignal
from methods import AVERAGES, make_average
from methods.averages.iterates import IterateAverage
from models.segmenter import build_segmenter
from study.identity import label, setting_of

ITERATIONS = 10
MIB = ("method.name=mib", *SHORT)
MOVING = {
    "ema": ("average.name=ema", "average.options.decay=0.5"),
    "swa": ("average.name=swa", "average.options.share=0.5"),
}
of_every_kind = pytest.mark.parametrize("average", MOVING.values(), ids=MOVING)


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def wander(average, model, frozen: str = "", last: int = ITERATIONS, counted=None) -> list[dict]:
    """Give the model other random weights after each update, the frozen ones excepted;
    returns all of them."""
    average.begin_step(model, STEPS[1])
    states = []
    for iteration in range(1, last + 1):
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                if name != frozen:
                    tensor.copy_(torch.randn_like(tensor))
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        if counted is None or iteration in counted:
            average.after_update(model, iteration, last)
    return states


# ---- the formulas ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("statistics", ["average", "recompute"])
@pytest.mark.parametrize(("decay", "warm"), [(0.999, 10), (0.3, 2)])
def test_ema_is_the_sum_written_out(decay, warm, statistics):
    """The warm-up (1 + t) / (10 + t) is below the decay for the first `warm` updates."""
    model, average = network(3), make_average("ema", {"decay": decay, "statistics": statistics})
    states = wander(average, model)
    decays = [(1 + t) / (10 + t) if t <= warm else decay for t in range(1, ITERATIONS + 1)]
    factors = [1.0] + [1 - d for d in decays[1:]]  # the first weights are the mean
    for t in range(ITERATIONS):
        factors[t] *= math.prod(decays[t + 1 :])
    assert sum(factors) == pytest.approx(1)
    assert_is_mean(average, model, states, factors, statistics)


@pytest.mark.parametrize("statistics", ["average", "recompute"])
@pytest.mark.parametrize(
    ("share", "every", "counted"),
    [
        (0.25, 1, (9, 10)),
        (0.5, 2, (6, 8, 10)),
        (0.7, 3, (4, 7, 10)),
        (0.01, 1, (10,)),
        (1.0, 1, range(1, 11)),
    ],
)
def test_swa_is_the_mean_of_those_that_count(share, every, counted, statistics):
    options = {"share": share, "every": every, "statistics": statistics}
    model, average = network(3), make_average("swa", options)
    states = wander(average, model)
    factors = [1 / len(counted) if t in counted else 0.0 for t in range(1, ITERATIONS + 1)]
    assert_is_mean(average, model, states, factors, statistics)


def assert_is_mean(average, model, states, factors, statistics) -> None:
    average.end_step(model, STEPS[1])
    assert average.stale_statistics == (statistics == "recompute")
    for name, tensor in model.state_dict().items():
        if "running" in name and statistics == "recompute":
            assert torch.equal(tensor, states[-1][name])
        else:
            expected = sum(f * state[name] for f, state in zip(factors, states, strict=True))
            torch.testing.assert_close(tensor, expected, rtol=1e-12, atol=1e-12)


@of_every_kind
def test_what_did_not_move_keeps_its_bits(average):
    name = average[0].removeprefix("average.name=")
    model = network(3).float()
    frozen = model.classifiers[0].weight.requires_grad_(False).clone()
    made = make_average(name, {"statistics": "average"})
    wander(made, model, frozen="classifiers.0.weight", last=50)
    made.end_step(model, STEPS[1])
    assert torch.equal(model.classifiers[0].weight, frozen)


def test_counts_are_not_averaged():
    model, average = torch.nn.BatchNorm2d(2), make_average("ema", {"statistics": "average"})
    average.begin_step(model, STEPS[1])
    for iteration in (1, 2):
        model.num_batches_tracked += 7
        average.after_update(model, iteration, 2)
    average.end_step(model, STEPS[1])
    assert model.num_batches_tracked == 14


def test_only_updates_count():
    """Here the second, fifth and tenth: as if there had been no other."""
    some, few = make_average("ema"), make_average("ema")
    model = network(3)
    states = wander(some, model, counted=(2, 5, 10))
    few.begin_step(model, STEPS[1])
    for iteration, t in enumerate((2, 5, 10), start=1):
        model.load_state_dict(states[t - 1])
        few.after_update(model, iteration, 3)
    assert same(some.mean, few.mean) and some.count == few.count == 3


def test_a_step_without_an_update_that_counts_hands_over_its_last_weights():
    model, average = network(3), make_average("swa")
    states = wander(average, model, counted=(1, 2))  # then a phase that updates nothing
    average.end_step(model, STEPS[1])
    assert same(model.state_dict(), states[-1]) and not average.stale_statistics


# ---- the statistics of the norms ---------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["abn", "abn_lean", "iabn"])
def test_recomputed_statistics_are_the_mean_over_the_batches(norm):
    if norm == "iabn":
        pytest.importorskip("inplace_abn")
    torch.manual_seed(0)
    model = build_segmenter(
        "resnet_tiny", output_stride=8, norm=norm, head_channels=8, dilations=[1, 2, 3]
    ).train()
    model.add_classes(3)
    norms = [m for m in model.modules() if hasattr(m, "running_mean")]
    first, still = norms[0], norms[-1].eval()
    untouched = still.running_mean.clone()
    batches = [torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8) for _ in range(3)]
    inputs = []
    first.register_forward_pre_hook(lambda _, args: inputs.append(args[0].clone()))
    recompute_statistics(model, batches, Placement(torch.device("cpu"), False, "off"))
    means = torch.stack([x.mean((0, 2, 3)) for x in inputs]).mean(0)
    variances = torch.stack([x.var((0, 2, 3), unbiased=True) for x in inputs]).mean(0)
    torch.testing.assert_close(first.running_mean, means)
    torch.testing.assert_close(first.running_var, variances)
    assert torch.equal(still.running_mean, untouched)
    assert {m.momentum for m in norms} == {0.1}
    once = copy.deepcopy(model.state_dict())
    recompute_statistics(model, batches, Placement(torch.device("cpu"), False, "off"))
    assert same(once, model.state_dict())  # what they were before has no say


# ---- in a step ---------------------------------------------------------------------------------------------


def watch_updates(monkeypatch) -> list[tuple[int, int, dict]]:
    """Iteration, last one and weights of each update that an average is told of."""
    seen, original = [], IterateAverage.after_update

    def after_update(self, model, iteration, last):
        seen.append((iteration, last, {name: p.detach().clone() for name, p in model.named_parameters()}))
        original(self, model, iteration, last)

    monkeypatch.setattr(IterateAverage, "after_update", after_update)
    return seen


def test_the_average_is_saved_and_scored_and_the_next_step_starts_from_it(
    toy_arguments, tmp_path, monkeypatch
):
    seen, starts, original = watch_updates(monkeypatch), [], engine.step.begin_step

    def begin_step(*arguments):
        begun = original(*arguments)
        starts.append({name: p.detach().clone() for name, p in begun[0].named_parameters()})
        return begun

    monkeypatch.setattr(engine.step, "begin_step", begin_step)
    assert (
        train.main(
            toy_arguments(
                "method.name=ft", *MOVING["swa"], *SHORT, *THREE, "train.epochs_later=4", name="swa"
            )
        )
        == 0
    )
    steps: list[list[dict]] = []
    for iteration, _, weights in seen:
        steps += [[]] if iteration == 1 else []
        steps[-1].append(weights)
    assert len(steps) == 3
    run = tmp_path / "runs/swa"
    assert same({n: saved(run, 0)["model"][n] for n in steps[0][-1]}, steps[0][-1])  # from step 1 on
    second = saved(run, 1)["model"]
    counted = steps[1][-(len(steps[1]) // 2) :]
    assert len(counted) > 1
    for name, tensor in second.items():
        if name in counted[0]:
            torch.testing.assert_close(tensor, sum(weights[name] for weights in counted) / len(counted))
    assert any(not torch.equal(second[name], last) for name, last in steps[1][-1].items())
    assert all(torch.equal(second[name], starts[2][name]) for name in steps[1][-1])
    assert json.loads((run / "results.json").read_text())["steps"][1]["gradient_evaluations"] == len(steps[1])


@of_every_kind
def test_training_does_not_notice_before_the_end_of_the_step(average, toy_arguments, tmp_path, monkeypatch):
    trained, original = [], IterateAverage.end_step

    def end_step(self, model, step):
        trained.append(copy.deepcopy(model.state_dict()))
        original(self, model, step)

    monkeypatch.setattr(IterateAverage, "end_step", end_step)
    options = (*MIB, "train.epochs_later=4")
    assert train.main(toy_arguments(*options, *average, name="averaged")) == 0
    assert train.main(toy_arguments(*options, name="plain")) == 0
    plain, averaged = (saved(tmp_path / "runs" / name)["model"] for name in ("plain", "averaged"))
    assert same(trained[1], plain)
    moved = {name for name in plain if not torch.equal(plain[name], averaged[name])}
    assert any("running_var" in name for name in moved) and "classifiers.1.weight" in moved


@pytest.mark.parametrize("statistics", ["average", "recompute"])
@of_every_kind
def test_a_stopped_step_resumes_with_the_same_bits(average, statistics, toy_arguments, tmp_path, monkeypatch):
    """And would not without the state of the average."""
    options = (
        *MIB,
        *average,
        f"average.options.statistics={statistics}",
        "phase.name=altersgd",
        "phase.p=0.5",
    )
    options += ("train.epochs_later=6",)
    walk_until(toy_arguments(*options, name="whole"))
    assert stop_and_go(toy_arguments(*options, name="pieces"), 5) > 1
    monkeypatch.setattr(IterateAverage, "load_state_dict", lambda self, state: None)
    stop_and_go(toy_arguments(*options, name="forgetful"), 5)
    whole, pieces, forgetful = (
        saved(tmp_path / "runs" / name)["model"] for name in ("whole", "pieces", "forgetful")
    )
    assert same(whole, pieces) and not same(whole, forgetful)


@pytest.mark.parametrize(
    ("phase", "updates"),
    [("stop", [(1, 2), (2, 2)]), ("pause", [(1, 4), (2, 4)]), ("altersgd", [(1, 4), (2, 4), (3, 4), (4, 4)])],
)
def test_the_average_hears_of_updates_alone(phase, updates, toy_arguments, monkeypatch):
    seen = watch_updates(monkeypatch)
    options = ("method.name=mib", "average.name=ema", f"phase.name={phase}", "phase.p=0.5", "train.epochs=1")
    assert train.main(toy_arguments(*options, "run.tracker=none", "run.pictures=0")) == 0
    assert [(iteration, last) for iteration, last, _ in seen][2:] == updates


def test_an_update_that_overflows_does_not_count(toy_arguments, monkeypatch):
    calls = []

    class OverflowingScaler(torch.amp.GradScaler):
        def scale(self, outputs):
            return super().scale(outputs) * (math.inf if len(calls) in (0, 2) else 1.0)

        def update(self) -> None:
            super().update()
            calls.append(self.get_scale())

    monkeypatch.setattr(torch.amp, "GradScaler", OverflowingScaler)
    monkeypatch.setitem(AMP_DTYPES, "fp16", None)  # float32 with a scaler: a CPU is slow in fp16
    seen = watch_updates(monkeypatch)
    options = ("average.name=ema", "train.amp=fp16", "train.last_step=0")
    assert train.main(toy_arguments(*options)) == 0
    assert [iteration for iteration, *_ in seen] == [2, 4]


def test_what_is_handed_over_is_measured_too(toy_arguments, tmp_path, monkeypatch):
    measured = []

    def probe(self, model):
        measured.append(copy.deepcopy(model.state_dict()))
        return {"loss": float(len(measured))}

    monkeypatch.setattr("engine.probe.Probe.__call__", probe)
    options = ("run.flatness=2", "phase.p=0.5", *MIB)
    assert train.main(toy_arguments(*options, "average.name=ema", name="ema")) == 0
    step = json.loads((tmp_path / "runs/ema/results.json").read_text())["steps"][1]
    assert step["flatness"] == {"boundary": {"loss": 1.0}, "end": {"loss": 2.0}, "handed over": {"loss": 3.0}}
    assert same(measured[2], saved(tmp_path / "runs/ema")["model"]) and not same(measured[1], measured[2])
    assert train.main(toy_arguments(*options, name="plain")) == 0
    step = json.loads((tmp_path / "runs/plain/results.json").read_text())["steps"][1]
    assert list(step["flatness"]) == ["boundary", "end"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "statistics"), [("ema", "recompute"), ("swa", "average")])
def test_two_ranks_hand_over_the_weights_of_one(kind, statistics, toy_arguments, tmp_path):
    """Norms of the ranks' own differ, but if what they hand over did, `agree` would raise."""
    options = (*MIB, *MOVING[kind], f"average.options.statistics={statistics}", "train.epochs_later=4")
    for world, name, sync in ((1, "one", "true"), (2, "two", "true"), (2, "apart", "false")):
        arguments = toy_arguments(*options, f"model.sync={sync}", name=name)
        run_ranks(train_rank, (world, free_port(), arguments), world)
    one, two, apart = (saved(tmp_path / "runs" / name)["model"] for name in ("one", "two", "apart"))
    assert max((one[name] - two[name]).abs().max().item() for name in one) < 1e-9
    assert all(tensor.isfinite().all() for tensor in apart.values())


# ---- which run it is ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "called"),
    [
        (("configs/ema.yaml",), "EMA"),
        (("average.name=ema", "average.options.decay=0.9"), "EMA, decay 0.9"),
        (("configs/swa.yaml",), "SWA"),
        (
            ("average.name=swa", "average.options.share=0.5", "average.options.every=2"),
            "SWA, every 2, share 0.5",
        ),
    ],
)
@pytest.mark.usefixtures("at_the_root")
def test_tables_and_folders_call_them_by_name(options, called):
    config = read_config(["configs/methods/mib.yaml", "data.root=x", *options]).model_dump()
    assert label(setting_of(config), "15-1") == f"MiB + {called}"
    name = config["average"]["name"]
    assert short_name(config) == f"mib + {name}" and f"_mib-{name}_" in run_name(config)


@pytest.mark.parametrize(("first", "told"), [(0, [True, True]), (1, [False, True]), (2, [False, False])])
def test_a_step_tells_of_the_average_that_it_had(first, told):
    arguments = ["data.root=x", "average.name=ema", f"average.options.from_step={first}"]
    config = read_config(arguments).model_dump(mode="json")
    recipes = [trained_with(config, step, {}, [], None)["recipe"] for step in (0, 1)]
    assert ["average" in recipe for recipe in recipes] == told


@pytest.mark.parametrize("name", ["ema", "swa"])
def test_it_begins_at_its_step(name):
    model = network(3)
    for first, averages in ((0, True), (1, True), (2, False)):
        average = make_average(name, {"from_step": first})
        assert isinstance(average, AVERAGES[name])
        wander(average, model)
        assert bool(average.mean) == averages


def test_a_state_inside_a_step_without_its_average_is_refused(toy_arguments, tmp_path, capsys):
    arguments = toy_arguments(*MIB, "average.name=ema", "train.epochs_later=4")
    with pytest.raises(StoppedBySignal):
        walk_until(arguments, 4)
    file: Path = tmp_path / "runs/run/resume.pt"
    state = checkpoint.load(file)
    assert state["parts"].pop("average")["count"] == 3
    checkpoint.save(state, file)
    assert train.main(arguments) == 2
    assert "resume.pt: not a state inside a step of this run (KeyError" in capsys.readouterr().err
