"""One registry style: a file with @register is all that something new needs which is chosen by name."""

import importlib
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import walk_until
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from configs import ConfigError, dump_config, load_config
from configs.errors import UserError
from configs.registry import Registry, RegistryError, Settings
from data import DATASETS
from engine import checkpoint
from engine.arguments import REGISTRIES, read_config, without_effect
from engine.optim import OPTIMIZERS, SCHEDULES
from engine.watch import StoppedBySignal
from methods import AVERAGES, METHODS, PHASES, UPDATES, Method, make_phase
from metrics.continual import METRICS
from models import BACKBONES
from scripts import compare, report
from study.launchers import LAUNCHERS, Resources
from study.layouts import Section, Table
from study.tables import SECTIONS
from tracking.tracker import TRACKERS, Tracker

ALL = [*REGISTRIES, LAUNCHERS]
CONFIGS = sorted((Path(train.__file__).parent / "configs").rglob("*.yaml"))
SHORT = ("train.epochs=1", "train.epochs_later=2", "run.pictures=0")


@pytest.fixture
def add_file(tmp_path, monkeypatch):
    """Puts a file into the folder of a registry, which a folder of the test stands in for."""
    added = []

    def add(registry: Registry, source: str, name: str = "brought_along") -> None:
        folder = tmp_path / registry.package
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(source)
        package, known = importlib.import_module(registry.package), set(registry)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
        importlib.invalidate_caches()
        added.append((registry, known, f"{registry.package}.{name}"))
        registry.discover()

    yield add
    for registry, known, module in added:
        for name in set(registry) - known:
            del registry[name]
        sys.modules.pop(module, None)


def error_of(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_config(list(arguments))
    return str(caught.value)


# ---- what holds for all of them ----------------------------------------------------------------------------


@pytest.mark.parametrize("registry", ALL, ids=lambda registry: registry.key)
def test_an_unknown_name_lists_the_choices_and_the_nearest(registry):
    names = list(registry)
    assert names == sorted(names) and len(names) == len(registry) > 0
    for name in names:
        with pytest.raises(RegistryError) as caught:
            registry.find(f"{name}x")
        assert str(caught.value).startswith(f"{registry.key}: '{name}x' is not one of {', '.join(names)}")
        assert f"(did you mean {name}?)" in str(caught.value)
        assert registry.find(name) is registry[name]


@pytest.mark.parametrize("registry", ALL, ids=lambda registry: registry.key)
def test_a_name_that_is_taken_is_refused(registry):
    name = next(iter(registry))
    before = registry[name]
    with pytest.raises(RegistryError, match=f"are both called '{name}'; rename one"):
        registry.register(name)(type("Another", (), {"__module__": __name__}))
    assert registry.register(name)(before) is registry[name] is before  # a file that is read again


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.key)
def test_the_schema_asks_the_registry(registry):
    wanted = f"{registry.key}: 'xyz' is not one of {', '.join(registry)} [command line]"
    assert wanted in error_of(f"{registry.key}=xyz", "data.root=/nowhere")


@pytest.mark.parametrize("registry", ALL, ids=lambda registry: registry.key)
def test_a_file_is_found_and_others_are_left_alone(registry, add_file, tmp_path):
    helper = "raise RuntimeError('no file without a decorator is imported; @register( in a text is none')"
    (tmp_path / registry.package).mkdir()
    (tmp_path / registry.package / "helper.py").write_text(helper)
    decorator = "register_schedule" if registry is SCHEDULES else "register"
    source = f"from configs.registry import Settings\nfrom {holder(registry)} import {decorator}\n"
    add_file(
        registry,
        f"{source}\n@{decorator}('one_more')\nclass OneMore(base()): pass\n".replace(
            "base()", base(registry)
        ),
    )
    assert "one_more" in registry and registry["one_more"].__module__ == f"{registry.package}.brought_along"


def holder(registry: Registry) -> str:
    """The module from which files of the registry import their decorator."""
    modules = (
        "data.dataset",
        "models.backbone",
        "methods.base",
        "methods.phases.descent",
        "methods.updates.plain",
        "methods.averages.none",
        "engine.optim",
        "engine.optim",
        "tracking.tracker",
    )
    by_key = dict(zip([r.key for r in REGISTRIES], modules, strict=True))
    return by_key.get(registry.key, "study.launchers")


def base(registry: Registry) -> str:
    return "__import__('methods').Method" if registry is METHODS else "object"


def test_an_option_without_a_default_is_refused():
    class Careless:
        class Options(Settings):
            size: int

    with pytest.raises(RegistryError, match="the option 'size' needs a default"):
        PHASES.register("careless")(Careless)
    assert "careless" not in PHASES


@pytest.mark.parametrize(
    "path", [path for path in CONFIGS if path.name != "base.yaml"], ids=lambda path: path.stem
)
def test_every_shipped_file_is_accepted_and_means_what_it_did(path, tmp_path):
    config = load_config([path], ["data.root=/nowhere"], REGISTRIES)
    assert config.phase.options == {} and config.run.tracker == ("tensorboard",)
    # An overlay may write the defaults out, so that they are stored with the results.
    assert config.update.options in ({}, UPDATES[config.update.name].Options().model_dump())
    average = AVERAGES[config.average.name].Options().model_dump()
    assert config.average.options.items() <= average.items()
    assert config == load_config([path], ["data.root=/nowhere"])
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert load_config([tmp_path / "again.yaml"], (), REGISTRIES) == config


# ---- one file each, and a run with it ----------------------------------------------------------------------

FADE = """
from configs.registry import Probability, Settings
from methods.base import Weights
from methods.phases.descent import Descent, register

@register("fade")
class Fade(Descent):
    "The retention term grows weaker by a share of itself every epoch."
    keys = ("lambda_a", "epoch")

    class Options(Settings):
        share: Probability = 0.5
        label: str = ""

    def __init__(self, lambda_a, epoch, **options):
        super().__init__(lambda_a, **options)
        self.epoch = epoch

    @classmethod
    def conflicts(cls, config):
        if config.phase.lr == "hold":
            yield "phase.lr", "'hold' is not for phase.name fade"

    def __call__(self, iteration, total):
        return Weights(1.0, self.lambda_a * (1 - self.options.share) ** ((iteration - 1) // self.epoch))
"""


def test_a_phase_with_an_option_of_its_own(add_file, toy_arguments, tmp_path):
    add_file(PHASES, FADE)
    arguments = toy_arguments(*SHORT, "method.name=mib", "phase.name=fade", "run.tracker=jsonl")
    assert train.main([*arguments, "phase.options.share=0.75"]) == 0
    kept = [line["phase/keep"] for line in read_lines(tmp_path / "runs/run") if "phase/keep" in line]
    assert kept == [10.0, 10.0, 10.0, 2.5]  # two iterations of step 0, then two epochs of one
    config = json.loads((tmp_path / "runs/run/results.json").read_text())["config"]
    assert config["phase"]["options"] == {"share": 0.75}
    assert make_phase("fade", strength=8.0, step=1, epoch=3)(4, 6).keep == 4.0  # by default a half


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("shape=0.5", "shape: phase 'fade' has no such option (it has: share, label) (did you mean share?)"),
        ("share=2", "share: 2 should be less than or equal to 1"),
        ("share=half", "share: 'half' is not a number but text"),
        ("label=3", "label: 3 is not text"),
    ],
)
def test_options_of_a_phase_are_checked_before_the_first_iteration(override, said, add_file):
    add_file(PHASES, FADE)
    assert f"phase.options.{said}" in error_of("phase.name=fade", f"phase.options.{override}")


def test_a_phase_says_what_it_cannot_work_with(add_file):
    add_file(PHASES, FADE)
    assert (
        error_of("phase.name=fade", "phase.lr=hold")
        == "phase.lr: 'hold' is not for phase.name fade [command line]"
    )


def test_an_update_rule(add_file, toy_arguments, tmp_path):
    add_file(
        UPDATES,
        """
from configs.registry import Settings
from methods.updates.plain import Update, register

@register("noisy")
class Noisy(Update):
    class Options(Settings):
        factor: float = 1.0

    def __call__(self, model, evaluate, weights, scale):
        terms = evaluate(weights)
        for p in model.parameters():
            p.grad *= self.options.factor
        return terms
""",
    )
    for name, options in {
        "plain": (),
        "same": ("update.name=noisy",),
        "none": ("update.name=noisy", "update.options.factor=0"),
    }.items():
        assert train.main(toy_arguments(*SHORT, *options, "run.tracker=none", name=name)) == 0
    weights = {name: weights_of(tmp_path / f"runs/{name}/step_1.pt") for name in ("plain", "same", "none")}
    for name in ("same", "none"):
        alike = all(torch.equal(weights["plain"][key], value) for key, value in weights[name].items())
        assert alike == (name == "same")
    assert "update.options.faktor: update 'noisy' has no such option" in error_of(
        "update.name=noisy", "update.options.faktor=1"
    )


def test_a_schedule(add_file, toy_arguments, tmp_path):
    add_file(
        SCHEDULES,
        """
import math
from engine.optim import register_schedule

@register_schedule("cosine")
def cosine(progress, optim):
    return (1 + math.cos(math.pi * progress)) / 2
""",
    )
    arguments = toy_arguments(*SHORT, "train.epochs_later=4", "run.tracker=jsonl")
    assert train.main([*arguments, "optim.schedule=cosine"]) == 0
    learning_rates = [line["lr"] for line in read_lines(tmp_path / "runs/run") if "lr" in line]
    falling = [(1 + math.cos(math.pi * share)) / 2 for share in (0, 0.25, 0.5, 0.75)]
    assert learning_rates == pytest.approx(
        [0.05, 0.025, *(0.02 * factor for factor in falling)]
    )  # anew in step 1


LION = """
import torch
from engine.optim import register

class Lion(torch.optim.Optimizer):
    def __init__(self, parameters, lr, decay=0.9):
        super().__init__(parameters, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.sub_(mean.lerp(p.grad, 1 - group["decay"]).sign(), alpha=group["lr"])
                mean.lerp_(p.grad, 1 - group["decay"])

@register("lion")
def lion(parameters, lr, config):
    return Lion(parameters, lr)
"""


def test_an_optimizer(add_file, toy_arguments, tmp_path):
    add_file(OPTIMIZERS, LION)
    quiet = (*SHORT, "run.tracker=none", "method.name=mib", "phase.name=altersgd", "phase.p=0.5")
    for name in ("sgd", "lion"):
        assert train.main(toy_arguments(*quiet, f"optim.name={name}", "optim.lr=0.001", name=name)) == 0
    sgd, lion = (weights_of(tmp_path / f"runs/{name}/step_1.pt") for name in ("sgd", "lion"))
    assert any(not torch.equal(sgd[key], value) for key, value in lion.items())
    assert "phase.momentum: 'reset' has nothing to change: optim.name lion has no momentum of its own" in (
        error_of("phase.name=altersgd", "phase.momentum=reset", "optim.name=lion")
    )


def test_class_weights_are_a_method_of_one_file(add_file, toy_arguments, tmp_path):
    add_file(
        METHODS,
        """
import torch
from torch.nn import functional as F

from configs.registry import Settings
from data.protocols import IGNORE_INDEX
from methods.base import register
from methods.losses.plain import num_pixels
from methods.mib import MiB

@register("weighted")
class Weighted(MiB):
    "MiB with a plain cross-entropy in which each class counts by its weight; the others count once."
    shares_first_step = False

    class Options(Settings):
        weights: list[float] = []

    def segmentation_loss(self, logits, labels):
        weights = torch.ones(logits.shape[1])
        given = self.options.weights[: len(weights)]
        weights[: len(given)] = torch.tensor(given)
        total = F.cross_entropy(logits, labels, weights, ignore_index=IGNORE_INDEX, reduction="sum")
        return total / num_pixels(labels, self.mean_over)
""",
    )
    losses = {}
    for name, weights in {"even": "[]", "ones": "[1, 1.0, 1]", "double": "[2, 2, 2, 2]"}.items():
        options = (f"method.options.weights={weights}", "run.tracker=jsonl", "train.last_step=0")
        assert train.main(toy_arguments(*SHORT, "method.name=weighted", *options, name=name)) == 0
        losses[name] = next(
            line["loss/seg"] for line in read_lines(tmp_path / f"runs/{name}") if "loss/seg" in line
        )
    assert losses["even"] == losses["ones"] and losses["double"] == pytest.approx(2 * losses["even"])
    assert "method.options.weights" in error_of("method.name=weighted", "method.options.weights=[heavy]")


def test_a_backbone(add_file, toy_arguments, tmp_path):
    add_file(
        BACKBONES,
        """
from torch import nn
from models.backbone import register

@register("stripes")
class Stripes(nn.Module):
    out_channels = 4

    def __init__(self, *, output_stride, norm):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, output_stride, stride=output_stride), norm(4)

    def stages(self, x):
        yield self.norm(self.conv(x))

    def before_activation(self, stage):
        return stage
""",
    )
    assert train.main(toy_arguments(*SHORT, "method.name=plop", "model.body=stripes")) == 0
    assert weights_of(tmp_path / "runs/run/step_1.pt")["body.conv.weight"].shape == (4, 3, 8, 8)


def test_a_backbone_that_lacks_a_part_is_refused(add_file, toy_arguments, capsys):
    source = (
        "from torch import nn\nfrom models.backbone import register\n\n"
        "@register('hollow')\ndef hollow(*, output_stride, norm):\n    return nn.Identity()\n"
    )
    add_file(BACKBONES, source)
    assert train.main(toy_arguments("model.body=hollow")) == 2
    assert (
        "'hollow' has no out_channels; models/backbone.py says what a backbone needs"
        in capsys.readouterr().err
    )


def test_a_data_set(add_file, toy_arguments, tmp_path):
    add_file(
        DATASETS,
        """
from dataclasses import replace
from data.dataset import register
from data.protocols import PROTOCOLS
from data.voc import load_voc

PROTOCOLS["toys"] = {"15-1": ((1, 2), (3,))}

@register("toys")
def load_toys(root, train_list):
    return replace(load_voc(root, train_list), name="toys")
""",
    )
    try:
        assert train.main(toy_arguments(*SHORT, "data.dataset=toys", "data.steps=null")) == 0
        assert "'2-2' is not one of 15-1" in error_of("data.dataset=toys", "data.protocol=2-2")
    finally:
        del importlib.import_module("data.protocols").PROTOCOLS["toys"]
    results = json.loads((tmp_path / "runs/run/results.json").read_text())
    assert results["protocol"] == [[1, 2], [3]] and len(results["steps"]) == 2
    assert "data.steps: is required with data.dataset toys" in error_of("data.dataset=toys")


def test_a_tracker(add_file, toy_arguments, tmp_path):
    add_file(
        TRACKERS,
        """
from tracking.tracker import Tracker, register

@register("diary")
class Diary(Tracker):
    def results(self, result, at):
        with open(self.folder / "diary.txt", "a") as file:
            file.write(f"step {result['step']} ended at {at}\\n")
""",
    )
    assert train.main(toy_arguments(*SHORT, "run.tracker=[diary, jsonl]")) == 0
    assert (tmp_path / "runs/run/diary.txt").read_text() == "step 0 ended at 2\nstep 1 ended at 4\n"
    assert not list((tmp_path / "runs/run").glob("events.*"))


def test_a_metric_appears_in_results_tables_and_trackers(add_file, toy_arguments, toy_run, tmp_path, capsys):
    older = toy_run()
    capsys.readouterr()
    results = json.loads((older / "results.json").read_text())
    for step in results["steps"]:
        del step["metrics"]  # as before there were any
    (older / "results.json").write_text(json.dumps(results))
    add_file(
        METRICS,
        """
from metrics.continual import register

@register("worst")
def worst(history, steps):
    "The least IoU of a class."
    return min((iou for iou in history[-1].values() if iou is not None), default=None)
""",
    )
    name, names = "own", ["run", "own"]
    assert train.main(toy_arguments("method.name=ft", "run.tracker=[tensorboard, jsonl]", name=name)) == 0
    steps = json.loads((tmp_path / f"runs/{name}/results.json").read_text())["steps"]
    values = [min(step["iou"].values()) for step in steps]
    assert [step["metrics"]["worst"] for step in steps] == values
    shown = f"{100 * values[-1]:.1f}"
    *_, header, _, _, last = [
        line for line in capsys.readouterr().out.split("results: ")[0].splitlines() if line
    ]
    assert header.split()[-3:] == ["|", "hiou", "worst"] and last.split()[-1] == shown
    lines = read_lines(tmp_path / f"runs/{name}")
    assert [line["metrics/worst"] for line in lines if "metrics/worst" in line] == values
    events = EventAccumulator(str(tmp_path / f"runs/{name}")).Reload()
    assert [e.value for e in events.Scalars("by_step/metrics/worst")] == pytest.approx(values)

    assert compare.main([str(tmp_path / "runs" / run) for run in names]) == 0
    header, _, before, now = capsys.readouterr().out.splitlines()[-4:]
    assert header.split()[-4:] == ["|", "hiou", "worst", "steps"]
    earlier = json.loads((tmp_path / "runs/run/results.json").read_text())["steps"][-1]
    assert "metrics" not in earlier and now.split()[-2] == shown
    assert before.split()[-2] == f"{100 * min(earlier['iou'].values()):.1f}"  # from its IoU
    assert (
        report.main([str(tmp_path / "runs"), "--out", str(tmp_path / "report"), "--formats", "markdown"]) == 0
    )
    text = (tmp_path / "report/report.md").read_text()
    row = next(line for line in text.split("## Further metrics")[1].splitlines() if line.startswith("| FT"))
    assert row.rstrip(" |").split(" | ")[-1] == shown
    assert report.main([str(older), "--out", str(tmp_path / "old"), "--formats", "markdown"]) == 0
    assert "Further metrics" not in (tmp_path / "old/report.md").read_text()


def test_a_table_of_the_report_is_a_function_of_the_runs(toy_run, tmp_path, monkeypatch):
    def table_seeds(runs):
        rows = [[str(run.seed), str(len(run.steps))] for run in runs.runs]
        return Section("seeds", "Seeds", [Table("What ran", ["seed", "steps"], rows)])

    monkeypatch.setitem(SECTIONS, "seeds", table_seeds)
    arguments = [str(toy_run()), "--out", str(tmp_path / "report"), "--tables", "seeds"]
    assert report.main(arguments) == 0
    for name, row in {"md": "| 42 | 2 |", "tex": "42 & 2", "html": "<td>42</td><td>2</td>"}.items():
        assert row in (tmp_path / f"report/report.{name}").read_text()


def test_a_launcher(add_file, tmp_path, capsys):
    add_file(
        LAUNCHERS,
        """
import subprocess
from study.launchers import Event, Launcher, register

@register("one_by_one")
class OneByOne(Launcher):
    def __call__(self, tasks, stop):
        for task in tasks:
            yield task, Event.STARTED
            yield task, Event.DONE if subprocess.run(task.command).returncode == 0 else Event.FAILED
""",
    )
    from scripts import reproduce
    from study.launch import launch

    command = ["reproduce", "table1", "--preset", "shapes", "--launcher"]
    assert reproduce.parse([*command[1:], "one_by_one"]).launcher == "one_by_one"
    assert reproduce.main([*command[1:], "one_by_on"]) == 2
    assert (
        "is not one of local, one_by_one, slurm, submitit-local, torchrun (did you mean one_by_one?)"
        in capsys.readouterr().err
    )
    job = SimpleNamespace(arguments=(f"open({str(tmp_path / 'ran')!r}, 'w')",), needs=None)
    runs = [SimpleNamespace(name="a", log=tmp_path / "log", job=job)]
    events = launch(runs, None, Resources("one_by_one", tmp_path), [sys.executable, "-c"])
    assert [(task.name, str(event)) for task, event in events] == [("a", "started"), ("a", "done")]
    assert (tmp_path / "ran").exists()


# ---- trackers ----------------------------------------------------------------------------------------------


def read_lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "scalars.jsonl").read_text().splitlines()]


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load(path)["model"]


def test_trackers_change_no_bit_of_the_model(toy_arguments, tmp_path):
    for name, trackers in {"two": "[tensorboard, jsonl]", "none": "none", "empty": "[]"}.items():
        assert train.main(toy_arguments(*SHORT, "method.name=mib", f"run.tracker={trackers}", name=name)) == 0
    first = weights_of(tmp_path / "runs/two/step_1.pt")
    for name in ("none", "empty"):
        other = weights_of(tmp_path / f"runs/{name}/step_1.pt")
        assert other.keys() == first.keys() and all(torch.equal(other[key], first[key]) for key in first)
        assert not [
            *(tmp_path / f"runs/{name}").glob("events.*"),
            *(tmp_path / f"runs/{name}").glob("*.jsonl"),
        ]
    assert list((tmp_path / "runs/two").glob("events.*"))
    lines = read_lines(tmp_path / "runs/two")
    assert [line["iteration"] for line in lines] == [1, 2, 2, 3, 4, 4]
    results = json.loads((tmp_path / "runs/two/results.json").read_text())["steps"]
    assert [line["miou/all"] for line in lines if "miou/all" in line] == [
        step["miou"]["all"] for step in results
    ]


def test_a_tracker_named_twice_is_refused():
    assert "run.tracker: ['jsonl', 'jsonl'] names one twice" in error_of("run.tracker=[jsonl, jsonl]")


def test_every_tracker_offers_what_the_engine_asks_for():
    asked = {name for name in vars(Tracker) if not name.startswith("_")}
    combined = importlib.import_module("tracking.tracker").Trackers
    assert asked - {"is_new", "place", "recorded"} <= set(
        vars(combined)
    )  # one that is not passed on would reach nobody


# ---- optimizers --------------------------------------------------------------------------------------------


ADAMW = ("method.name=mib", "optim.name=adamw", "optim.lr=0.002", "optim.lr_later=0.001", "run.tracker=none")


def test_a_run_by_adamw_goes_on_with_the_same_bits(toy_arguments, tmp_path):
    options = (*SHORT, *ADAMW, "train.epochs_later=3", "train.last_step=1")
    walk_until(toy_arguments(*options, name="whole"))
    arguments = toy_arguments(*options, name="pieces")
    with pytest.raises(StoppedBySignal, match="step 1, iteration 2 of 3"):
        walk_until(arguments, 3)
    saved = checkpoint.load(tmp_path / "runs/pieces/resume.pt")["parts"]["optimizer"]
    assert {"exp_avg", "exp_avg_sq", "step"} <= set(saved["state"][0])
    walk_until(arguments)
    whole, pieces = (weights_of(tmp_path / f"runs/{name}/step_1.pt") for name in ("whole", "pieces"))
    assert all(torch.equal(tensor, pieces[name]) for name, tensor in whole.items())
    with pytest.raises(UserError, match=r"optim.name: 'adamw' -> 'sgd'"):
        walk_until([*arguments, "optim.name=sgd"])  # what it has averaged is of no use to another


@pytest.mark.parametrize("momentum", ["off", "reset"])
@pytest.mark.parametrize("phase", ["altersgd", "consolidate"])
def test_a_phase_cannot_change_a_momentum_that_the_optimizer_has_not(phase, momentum):
    settings = (f"phase.momentum={momentum}", "optim.name=adamw")
    said = f"phase.momentum: '{momentum}' has nothing to change: optim.name adamw has no momentum of its own"
    assert error_of(f"phase.name={phase}", *settings).startswith(said)
    read_config(["phase.name=descent", *settings])
    read_config(
        [f"phase.name={phase}", "optim.name=adamw", "phase.weight_decay=signed"]
    )  # of which it has one


@pytest.mark.parametrize("method", ["ewc", "pi", "rw"])
def test_a_pull_that_is_limited_for_sgd_is_refused_with_another_optimizer(method):
    said = error_of(f"method.name={method}", "optim.name=adamw")
    assert said.startswith(f"optim.name: 'adamw' is not for method.name {method}, whose pull is limited by")
    read_config(["method.name=mib", "optim.name=adamw"])


def test_what_adamw_does_not_use_is_noted():
    def notes(*settings):
        return [note.partition(" has no effect")[0] for note in without_effect(read_config(list(settings)))]

    settings = ("optim.momentum=0.8", "optim.nesterov=false", "optim.weight_decay=0.1")
    assert notes(*settings) == []
    assert notes("optim.name=adamw", *settings) == ["optim.momentum=0.8", "optim.nesterov=False"]


# ---- what cannot work together -----------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["altersgd", "consolidate"])
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ("phase.momentum=off", "optim.momentum=0", "optim.nesterov=false"),
            "phase.momentum: 'off' has nothing to change",
        ),
        (
            ("phase.momentum=reset", "optim.momentum=0", "optim.nesterov=false"),
            "phase.momentum: 'reset' has nothing to",
        ),
        (
            ("phase.weight_decay=signed", "optim.weight_decay=0"),
            "phase.weight_decay: 'signed' has nothing to change",
        ),
    ],
)
def test_a_phase_that_has_nothing_to_change_is_refused(phase, settings, said):
    assert error_of(f"phase.name={phase}", *settings).startswith(said)
    read_config([f"phase.name={phase}", *settings[:1]])
    read_config(["phase.name=descent", *settings])  # which changes nothing in the first place


def test_outputs_are_what_methods_are_promised():
    from methods.base import Output
    from models.segmenter import Output as Given

    promised = {name for name, member in vars(Output).items() if isinstance(member, property)}
    assert promised == set(Given._fields)


def test_methods_keep_their_options_typed():
    for name in METHODS:
        method = METHODS[name]()
        assert isinstance(method, Method) and method.options == METHODS[name].Options()


def test_a_setting_without_effect_is_noted():
    def notes(*settings):
        return [note.partition(" has no effect")[0] for note in without_effect(read_config(list(settings)))]

    unused = ("phase.p=0.5", "phase.lambda_a=3", "update.rho=0.1", "update.penalty=0.5")
    assert notes(*unused) == ["phase.p=0.5", "phase.lambda_a=3.0", "update.rho=0.1", "update.penalty=0.5"]
    assert notes(*unused, "phase.name=altersgd", "update.name=sam") == ["update.penalty=0.5"]
    assert notes(*unused, "run.flatness=2", "update.name=gradient_penalty") == [
        "phase.lambda_a=3.0",
        "update.rho=0.1",
    ]
    assert notes("phase.p=25/30", "update.rho=0.05") == []  # what they are anyway
