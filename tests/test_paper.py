"""The paper's numbers: they agree with each other, and with the file they were
typed from where somebody has it.
"""

from fractions import Fraction
from statistics import fmean
from typing import get_args

import pytest
import yaml

from configs.schema import PhaseConfig, load_config
from data.protocols import PROTOCOLS
from engine.arguments import read_config
from methods import METHODS, published_strength
from study import identity, paper

HALF_A_DIGIT = 0.05
MIB = "configs/methods/mib.yaml"
ALTERSGD = (MIB, "configs/altersgd.yaml")


def config(*arguments: str) -> dict:
    """Resolved, as it stands in results.json."""
    return read_config([*arguments, "data.root=/nowhere"]).model_dump(mode="json")


# ---- the numbers -------------------------------------------------------------------------------------------


def group_means(per_class) -> list[float]:
    return [fmean(per_class[: paper.NUM_OLD]), fmean(per_class[paper.NUM_OLD :]), fmean(per_class)]


@pytest.mark.parametrize("row", paper.MEANS)
def test_the_means_follow_from_the_classes_but_for_two_rows(row):
    assert len(paper.PER_CLASS[row]) == len(paper.CLASSES) == 20
    # half a digit of the classes and half a digit of the mean itself
    errors = [abs(a - b) for a, b in zip(group_means(paper.PER_CLASS[row]), paper.MEANS[row], strict=True)]
    assert (max(errors) <= 2 * HALF_A_DIGIT + 1e-9) == (row not in paper.CONTRADICTORY)


def test_the_tables_agree_with_each_other():
    rows = ("MiB", "AlterSGD")
    assert paper.TABLE_3[100] == {row: paper.MEANS[row] for row in rows}
    for number, strength in enumerate(paper.LAMBDAS):
        diagonal = tuple(paper.TABLE_4[group][strength][number] for group in paper.GROUPS)
        assert diagonal == paper.TABLE_3[strength]["AlterSGD"]
    triples = [means for pair in paper.TABLE_3.values() for means in pair.values()]
    for strength in paper.LAMBDAS:
        triples += zip(*(paper.TABLE_4[group][strength] for group in paper.GROUPS), strict=True)
    for old, new, every in triples:
        assert (15 * old + 5 * new) / 20 == pytest.approx(every, abs=2 * HALF_A_DIGIT + 1e-9)


def test_the_numbers_are_those_of_the_shared_tables(shared):
    tables = yaml.safe_load((shared / "paper/tables.yaml").read_text(encoding="utf-8"))
    assert list(paper.CLASSES) == tables["classes"]
    printed = tables["table_1_and_2"]
    assert {row: list(values) for row, values in paper.PER_CLASS.items()} == {
        row: printed[row]["per_class"] for row in printed
    }
    assert {row: list(means) for row, means in paper.MEANS.items()} == {
        row: printed[row]["means"] for row in printed
    }
    assert tables["table_3"] == {
        x: {row: list(means) for row, means in pair.items()} for x, pair in paper.TABLE_3.items()
    }
    assert list(paper.LAMBDAS) == tables["table_4"].pop("lambda_a")
    assert tables["table_4"] == {
        group: {b: list(values) for b, values in rows.items()} for group, rows in paper.TABLE_4.items()
    }
    for p, said in tables["figure_p"].items():
        if p != "advice":
            means = dict(zip(paper.GROUPS, paper.FIGURE_P[Fraction(p)], strict=True))
            said = dict.fromkeys(paper.GROUPS, said) if isinstance(said, str) else said
            for group, value in said.items():
                assert means[group] == (paper.ALMOST_ZERO if "almost zero" in str(value) else value)
    setting = tables["setting"]
    assert setting["protocol"] == paper.SETTING["data"]["protocol"]
    assert setting["mode"] == paper.SETTING["data"]["mode"]
    assert {setting["epochs"]} == set(paper.SETTING["train"].values())
    assert [setting["lr_first"], setting["lr_later"]] == list(paper.SETTING["optim"].values())
    assert (
        setting["lambda_reg"] == identity.mib_strength("15-1") and Fraction(setting["p"]) == paper.DEFAULT_P
    )


# ---- which row a run belongs to ----------------------------------------------------------------------------


@pytest.mark.parametrize("row", paper.METHODS)
def test_the_overlay_of_a_method_is_its_row(row):
    overlay = f"configs/methods/{paper.METHODS[row][0]}.yaml"
    assert identity.row_of(config(overlay)) == row
    assert identity.row_of(config("configs/voc/15-5.yaml", overlay)) == row
    assert identity.row_of(config("configs/quickstart.yaml", overlay, "train.seed=3")) == row


def test_altersgd_and_joint_are_rows():
    assert identity.row_of(config(*ALTERSGD)) == "AlterSGD"
    assert identity.row_of(config("configs/voc/offline.yaml")) == "Joint"
    assert identity.row_of(config("data.steps=[[1, 2, 3]]")) == "Joint"


@pytest.mark.parametrize(
    "same, as_row",
    [
        ([MIB, "phase.p=0.5", "phase.momentum=off"], "MiB"),  # without effect: the phase is descent
        ([*ALTERSGD, "phase.p=1"], "MiB"),  # nothing alternates
        ([*ALTERSGD, "phase.lambda_a=100", "phase.lambda_b=100"], "AlterSGD"),
        ([*ALTERSGD, "method.strength=10", "phase.lambda_a=100", "phase.lambda_b=100"], "AlterSGD"),
        (["method.strength=10"], "FT"),  # fine-tuning has nothing to weigh
    ],
)
def test_configs_that_train_alike_are_one_row(same, as_row):
    assert identity.row_of(config(*same)) == as_row


@pytest.mark.parametrize(
    "variant, label",
    [
        ([MIB, "method.strength=10"], "MiB, λ 10"),
        ([MIB, "configs/consolidate.yaml"], "Consolidate"),
        ([MIB, "configs/consolidate.yaml", "phase.momentum=reset"], "Consolidate, momentum reset"),
        ([MIB, "configs/consolidate.yaml", "phase.batch=same"], "Consolidate, batch same"),
        ([MIB, "configs/consolidate.yaml", "phase.lambda_b=1"], "Consolidate, λ_a 100, λ_b 1"),
        ([*ALTERSGD, "phase.p=20/30"], "AlterSGD, p 20/30"),
        ([*ALTERSGD, "phase.p=0.9"], "AlterSGD, p 27/30"),
        ([*ALTERSGD, "phase.p=0.87"], "AlterSGD, p 0.87"),
        ([*ALTERSGD, "method.strength=10"], "AlterSGD, λ 10"),
        ([*ALTERSGD, "phase.lambda_b=1"], "AlterSGD, λ_a 100, λ_b 1"),
        ([*ALTERSGD, "phase.batch=same", "phase.lr=hold"], "AlterSGD, batch same, lr hold"),
        ([*ALTERSGD, "phase.from_step=0"], "AlterSGD, from_step 0"),
        (
            [*ALTERSGD, "phase.from_step=2", "phase.lambda_a=1", "phase.lambda_b=1"],
            "AlterSGD, λ 1, strength 100.0, from_step 2",
        ),
        (["configs/methods/lwf.yaml", "configs/altersgd.yaml"], "LwF + AlterSGD"),
        (["configs/methods/ewc.yaml", "method.options.decay=0.5"], "EWC, decay 0.5"),
        (["configs/voc/offline.yaml", MIB], "MiB, protocol offline"),
    ],
)
def test_variants_are_no_row_and_say_what_they_change(variant, label):
    of_variant = config(*variant)
    assert identity.row_of(of_variant) is None
    assert identity.label(identity.setting_of(of_variant), of_variant["data"]["protocol"]) == label


def test_strengths_are_those_of_the_methods():
    for protocol in {name for dataset in PROTOCOLS.values() for name in dataset}:
        for row, setting in identity.rows(protocol).items():
            if row != "Joint":
                assert setting.lambda_a == published_strength(setting.method, protocol)
    assert {name for name, _ in paper.METHODS.values()} <= set(METHODS)  # there are later ones


def test_choices_are_those_of_the_config_and_their_defaults_come_first():
    defaults = load_config([]).phase
    for key, choices in paper.CHOICES.items():
        assert getattr(defaults, key) == choices[0]
        if key not in ("from_step", "every"):  # which also take other numbers
            assert set(get_args(PhaseConfig.model_fields[key].annotation)) == set(choices)
    assert Fraction(defaults.p).limit_denominator(100) == paper.DEFAULT_P


def test_the_papers_setting_is_recognised():
    assert identity.is_papers(config("configs/voc/15-1.yaml", MIB))
    for other in ("data.mode=overlapped", "train.epochs_later=10", "model.body=resnet50"):
        assert not identity.is_papers(config("configs/voc/15-1.yaml", MIB, other))
