"""Which weights a step hands over: those of its last iteration, or fused with those of the step before."""

import json
import math
from pathlib import Path

import pytest
import torch
from conftest import mostly_slow, walk_until
from processes import free_port, run_ranks
from test_distributed import train_rank
from test_registry import add_file, error_of  # noqa: F401 (a fixture)
from test_resume import assert_same_statistics, stop_and_go
from toys import STEPS, ToySegmenter

import engine.step
import train
from configs import yaml_core
from configs.identity import run_name, short_name
from engine import checkpoint
from engine.arguments import read_config
from engine.identity import start_notes, trained_with
from methods import AVERAGES, METHODS, Average, make_average
from models.norm import make_norm
from study.identity import label, setting_of

EWF = "average.name=ewf"
FUSED = sorted(METHODS.keys() - {"dft", "ssul"})  # these two freeze all that steps share
THREE = ("data.steps=[[1], [2], [3]]", "data.mode=overlapped", "train.batch_size=2")
SHORT = ("train.epochs=1", "train.epochs_later=2", "run.pictures=0", "run.tracker=none")


def saved(run: Path, step: int = 1) -> dict:
    return checkpoint.load(run / f"step_{step}.pt")


def of_method(name: str) -> tuple[str, ...]:
    return (f"method.name={name}", *(("method.memory=4",) if METHODS[name].memory else ()))


def network(*num_classes: int) -> torch.nn.Module:
    """A toy with a norm, so that there are running statistics."""
    model = ToySegmenter(*num_classes)
    model.norm = make_norm("abn", None)(3).double()
    return model


# ---- the formula -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", STEPS[1:], ids=["one new class", "two new classes"])
def test_fused_weights_against_a_loop_over_every_number(step):
    model, average = network(step.num_old), make_average("ewf")
    old = {name: t.clone() for name, t in model.state_dict().items()}
    average.remember(model)
    model.add_classes(step.num_new)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(torch.randn_like(tensor))
    new = {name: t.clone() for name, t in model.state_dict().items()}
    average.end_step(model, step)

    a = math.sqrt(len(step.new) / (len(step.new) + 1 + len(step.old)))
    fused = model.state_dict()
    assert {"norm.running_mean", "norm.running_var"} <= old.keys() < fused.keys()
    for name, tensor in fused.items():
        for i, value in enumerate(tensor.flatten().tolist()):
            now = new[name].flatten()[i].item()
            expected = (1 - a) * old[name].flatten()[i].item() + a * now if name in old else now
            assert value == pytest.approx(expected, abs=1e-12), name


def test_weights_that_did_not_move_keep_their_bits():
    model, average = network(3).float(), make_average("ewf")
    before = {name: t.clone() for name, t in model.state_dict().items()}
    average.remember(model)
    average.end_step(model, STEPS[1])
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_counts_are_not_fused():
    model, average = torch.nn.BatchNorm2d(2), make_average("ewf")
    average.remember(model)
    model.num_batches_tracked += 7
    average.end_step(model, STEPS[1])
    assert model.num_batches_tracked == 7


def test_of_mibs_lowering_the_background_keeps_a_share(toy_run):
    run = toy_run("method.name=mib", EWF, *SHORT)
    before, after = (saved(run, step)["model"]["classifiers.0.bias"] for step in (0, 1))
    assert after[0] - before[0] == pytest.approx(-math.sqrt(1 / 4) * math.log(2), abs=1e-6)
    assert torch.equal(after[1:], before[1:])


# ---- in a step ---------------------------------------------------------------------------------------------


def test_what_is_saved_is_the_fusion_of_the_old_checkpoint_and_the_trained_model(
    toy_arguments, tmp_path, monkeypatch
):
    trained, original = {}, AVERAGES["ewf"].end_step

    def end_step(self, model, step):
        trained[step.index] = {name: t.clone() for name, t in model.state_dict().items()}
        original(self, model, step)

    monkeypatch.setattr(AVERAGES["ewf"], "end_step", end_step)
    assert train.main(toy_arguments("method.name=mib", EWF, *SHORT)) == 0
    first, second = (saved(tmp_path / "runs/run", step)["model"] for step in (0, 1))
    assert all(torch.equal(t, trained[0][name]) for name, t in first.items())
    for name, tensor in second.items():
        new = trained[1][name]
        torch.testing.assert_close(tensor, 0.5 * first[name] + 0.5 * new if name in first else new)
    moved = [name for name in first if not torch.equal(trained[1][name], second[name])]
    assert any("running_var" in name for name in moved) and any("head" in name for name in moved)


@pytest.mark.parametrize(
    "extra", [(), ("phase.name=altersgd", "phase.p=0.5", "phase.weight_decay=signed", "update.name=sam")]
)
def test_older_classifiers_do_not_move_in_a_step(extra, toy_arguments, monkeypatch):
    looks, original = [], engine.step.begin_step

    def begin_step(*arguments):
        begun = original(*arguments)
        looks.append((begun[0], {name: t.clone() for name, t in begun[0].state_dict().items()}))
        return begun

    monkeypatch.setattr(engine.step, "begin_step", begin_step)
    monkeypatch.setattr(AVERAGES["ewf"], "end_step", lambda *_: None)
    options = ("method.name=mib", EWF, "optim.weight_decay=0.1", *THREE, *SHORT)
    assert train.main(toy_arguments(*options, *extra)) == 0
    for step, (model, before) in enumerate(looks):
        still = {name for name, t in model.state_dict().items() if torch.equal(t, before[name])}
        assert {name for name in still if name.startswith("classifiers")} == {
            f"classifiers.{older}.{part}" for older in range(step) for part in ("weight", "bias")
        }


@pytest.mark.parametrize("method", mostly_slow(FUSED, ["mib", "ewc"]))
def test_every_method_runs_two_steps_and_resumes_with_the_same_bits(method, toy_arguments, tmp_path):
    options = (*of_method(method), EWF, *SHORT, *THREE)
    if method == "plop":
        options += ("method.strength=0.01",)
    walk_until(toy_arguments(*options, name="whole"))
    assert stop_and_go(toy_arguments(*options, name="pieces"), 2) > 1
    for step in (1, 2):
        whole, pieces = (saved(tmp_path / "runs" / name, step) for name in ("whole", "pieces"))
        assert all(torch.equal(t, pieces["model"][name]) for name, t in whole["model"].items())
        assert_same_statistics(whole["methods"], pieces["methods"])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mib", "ewc"])
def test_two_ranks_fuse_to_the_weights_of_one(method, toy_arguments, tmp_path):
    for world, name in ((1, "one"), (2, "two")):
        arguments = toy_arguments(f"method.name={method}", EWF, name=name)
        run_ranks(train_rank, (world, free_port(), arguments), world)
    one, two = (saved(tmp_path / "runs" / name)["model"] for name in ("one", "two"))
    assert max((one[name] - two[name]).abs().max().item() for name in one) < 1e-9


# ---- which run it is ---------------------------------------------------------------------------------------


def test_a_run_with_ewf_is_told_apart_from_one_without():
    plain, fused = (
        read_config(["data.root=x", "method.name=mib", *more]).model_dump() for more in ((), (EWF,))
    )
    assert (short_name(plain), short_name(fused)) == ("mib", "mib + ewf")
    assert run_name(fused) == run_name(plain).replace("mib", "mib-ewf")
    assert [label(setting_of(config), "15-1") for config in (plain, fused)] == ["MiB", "MiB + EWF"]


def test_a_config_from_before_the_key_means_none(toy_arguments, toy_run, capsys):
    """Its folder resumes without a difference."""
    options = ("method.name=mib", *SHORT)
    run = toy_run(*options)
    config = yaml_core.parse((run / "config.yaml").read_text())
    assert config.pop("average") == {"name": "none", "options": {}}
    (run / "config.yaml").write_text(yaml_core.dump(config))
    (run / "step_1.pt").unlink()
    whole = toy_run(*options, name="whole")
    assert short_name(config) == "mib"
    assert train.main(toy_arguments(*options)) == 0
    one, other = saved(run)["model"], saved(whole)["model"]
    assert all(torch.equal(t, other[name]) for name, t in one.items())
    capsys.readouterr()
    assert train.main(toy_arguments(*options, EWF)) == 2
    assert "average.name" in capsys.readouterr().err


def test_a_shared_step_0_is_nobodys_in_particular():
    """Step 0 is trained alike with and without EWF, a later step is not."""
    plain, fused = (read_config(["data.root=x", *more]).model_dump(mode="json") for more in ((), (EWF,)))
    for step, differs in ((0, False), (1, True)):
        theirs, ours = (trained_with(config, step, {}, [], None) for config in (plain, fused))
        notes = start_notes(Path("step.pt"), {"trained": theirs, "step": step}, ours)
        assert bool(notes) == differs and all("average.name" in note for note in notes)
        assert "average" not in theirs["recipe"]  # as checkpoints from before it existed have it


def test_an_unknown_average_lists_the_choices():
    assert "average.name: 'ewff' is not one of ema, ewf, none, swa" in error_of("average.name=ewff")


def test_an_average_of_ones_own_is_one_file(add_file, toy_arguments, tmp_path):  # noqa: F811
    source = """
from configs.registry import Settings
from methods.averages.none import Average, register

@register("shrink")
class Shrink(Average):
    class Options(Settings):
        factor: float = 1.0

    def end_step(self, model, step):
        for p in model.parameters():
            p.data *= self.options.factor
"""
    add_file(AVERAGES, source)
    options = ("train.last_step=0", "average.name=shrink", *SHORT)
    assert train.main(toy_arguments(*options, name="plain")) == 0
    assert train.main(toy_arguments(*options, "average.options.factor=0.5", name="half")) == 0
    whole, half = (
        saved(tmp_path / "runs" / name, 0)["model"]["classifiers.0.weight"] for name in ("plain", "half")
    )
    assert torch.equal(half, whole * 0.5)
    results = json.loads((tmp_path / "runs/half/results.json").read_text())
    assert results["config"]["average"] == {"name": "shrink", "options": {"factor": 0.5}}
    assert "average.options.share: average 'shrink' has no such option" in error_of(
        "average.name=shrink", "average.options.share=1"
    )


def test_none_hands_over_what_was_trained():
    assert type(make_average("none")) is Average
