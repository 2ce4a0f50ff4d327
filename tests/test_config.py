import json
import subprocess
import sys
from pathlib import Path

import pytest

from configs import ConfigError, config_differences, dump_config, load_config, yaml_core
from configs.identity import recipe_of, run_name
from configs.registry import Registry
from configs.schema import Config
from data.protocols import PROTOCOLS
from engine.arguments import REGISTRIES
from methods import METHODS as REGISTERED

FOLDER = Path(__file__).parent.parent / "configs"
CPU_RECIPE = FOLDER / "voc/15-1_cpu.yaml"  # not the published recipe
PROTOCOL_FILES = sorted({*FOLDER.glob("voc/*.yaml"), *FOLDER.glob("ade/*.yaml")} - {CPU_RECIPE})
METHOD_FILES = sorted(FOLDER.glob("methods/*.yaml"))
METHODS = ["ft", "lwf", "lwf_mc", "ilt", "mib", "ewc", "pi", "rw", "plop"]
KEYS = [
    f"{section}.{name}" for section, f in Config.model_fields.items() for name in f.annotation.model_fields
]


def problems(*overrides, overlays=(), registries=REGISTRIES):
    with pytest.raises(ConfigError) as caught:
        load_config(overlays, overrides, registries)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return caught.value.problems


@pytest.fixture
def overlay(tmp_path):
    def write(text, name="mine.yaml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


# ---------------------------------------------------------------------------------------------- shipped files


def test_base_holds_every_key_and_the_model_no_default():
    base = yaml_core.parse((FOLDER / "base.yaml").read_text())
    assert sorted(f"{section}.{name}" for section in base for name in base[section]) == sorted(KEYS)
    assert all(
        f.is_required() for s in Config.model_fields.values() for f in s.annotation.model_fields.values()
    )


def test_base_is_the_recipe_of_the_paper():
    config = load_config([])
    assert (config.data.dataset, config.data.protocol, config.data.mode) == ("voc", "15-1", "disjoint")
    assert (config.optim.lr, config.optim.lr_later, config.optim.weight_decay) == (0.01, 0.001, 1e-4)
    assert (config.train.epochs, config.train.batch_size, config.train.seed) == (30, 24, 42)
    assert (config.phase.p, config.method.strength, config.model.output_stride) == (25 / 30, None, 16)


def test_one_overlay_per_protocol_and_method():
    names = {dataset: {p.stem for p in PROTOCOL_FILES if p.parent.name == dataset} for dataset in PROTOCOLS}
    assert names == {dataset: set(protocols) for dataset, protocols in PROTOCOLS.items()}
    assert {path.stem for path in METHOD_FILES} == set(REGISTERED)


@pytest.mark.parametrize("path", PROTOCOL_FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_protocol_overlay(path):
    config = load_config([path])
    assert (config.data.dataset, config.data.protocol) == (path.parent.name, path.stem)
    assert config.train.epochs == config.train.epochs_later == {"voc": 30, "ade": 60}[path.parent.name]


@pytest.mark.parametrize("path", METHOD_FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("phase", ["altersgd", "consolidate", "pause", "stop"])
def test_method_and_phase_overlays_combine(path, phase):
    config = load_config(
        [FOLDER / "ade/100-10.yaml", path, FOLDER / f"{phase}.yaml"],
        registries=REGISTRIES,
    )
    assert (config.data.protocol, config.method.name, config.phase.name) == ("100-10", path.stem, phase)
    assert config.method.strength is None, "the protocol decides the published strength"


def test_the_reading_by_epoch_and_the_controls_of_flip_all_differ_from_the_rest_in_nothing_else():
    base = load_config([]).phase
    published = {"p": 25 / 30}
    expected = {
        "altersgd": {"name": "altersgd"},
        "altersgd_epoch": {"name": "altersgd", "flip": "all", "every": "epoch"},
        "pause": {"name": "pause"},
        "stop": {"name": "stop"},
    }
    for overlay, changes in expected.items():
        assert load_config([FOLDER / f"{overlay}.yaml"]).phase == base.model_copy(update=published | changes)
    assert (base.name, base.flip, base.every) == ("descent", "seg", "iteration")


@pytest.mark.parametrize("every", ["iteration", "epoch", 1, 3, 10**6])
def test_halves_last_an_iteration_an_epoch_or_a_number_of_iterations(every, overlay):
    config = load_config([], [f"phase.every={every}"])
    assert config.phase.every == every and type(config.phase.every) is type(every)
    assert load_config([overlay(dump_config(config))]) == config


def test_the_earlier_cpu_recipe_is_what_it_was():
    earlier = load_config([CPU_RECIPE])
    changed = ["model.head_channels=128", "train.epochs=8", "train.epochs_later=10"]
    assert load_config([FOLDER / "voc/15-1.yaml", FOLDER / "recipes/cpu.yaml"], changed) == earlier
    # As it stood before the recipe had a file of its own: runs of that time resume.
    assert config_differences(load_config([]).model_dump(), earlier.model_dump(), ()) == [
        "data.crop: 512 -> 128",
        "data.evaluate_size: 512 -> 144",
        "data.workers: 4 -> 1",
        "model.body: 'resnet101' -> 'mobilenet_v2'",
        "model.dilations: null -> [3, 6, 9]",
        "model.head_channels: 256 -> 128",
        "model.pretrained: null -> 'imagenet'",
        "optim.lr_later: 0.001 -> 0.002",
        "train.batch_size: 24 -> 12",
        "train.epochs: 30 -> 8",
        "train.epochs_later: 30 -> 10",
        "train.evaluate_batch: 8 -> 24",
    ]


def test_no_recipe_names_a_protocol_a_mode_or_a_data_set():
    for path in (FOLDER / "quickstart.yaml", *FOLDER.glob("recipes/*.yaml")):
        named = yaml_core.parse(path.read_text(encoding="utf-8"))["data"]
        assert not named.keys() & {"dataset", "protocol", "steps", "mode"}, path


RECIPES = sorted(path.stem for path in FOLDER.glob("recipes/*.yaml"))
# What each lineage does differently from MiB, which the paper follows.
DEPARTURES = {
    "mib": [],
    "plop": ["data.unseen: 'ignore' -> 'background'", "data.void: 'background' -> 'ignore'"],
    "ssul": [
        "data.augment: 'resized_crop' -> 'scale_crop'",
        "data.crop: 512 -> 513",
        "data.evaluate_size: 512 -> 513",
        "data.unseen: 'ignore' -> 'background'",
        "data.void: 'background' -> 'ignore'",
        "method.cross_entropy: 'all' -> 'valid'",
        "model.body: 'resnet101' -> 'resnet101_relu'",
        "model.head: 'deeplab' -> 'aspp'",
        "optim.lr_later: 0.001 -> 0.01",
        "train.batch_size: 24 -> 32",
        "train.epochs: 30 -> 50",
        "train.epochs_later: 30 -> 50",
    ],
    "dkd": [
        "data.unseen: 'ignore' -> 'background'",
        "model.body: 'resnet101' -> 'resnet101_relu'",
        "model.head: 'deeplab' -> 'aspp'",
        "train.batch_size: 24 -> 32",
        "train.epochs: 30 -> 60",
        "train.epochs_later: 30 -> 60",
    ],
}


@pytest.mark.parametrize("name", DEPARTURES)
def test_the_recipe_of_a_lineage_differs_from_mibs_in(name):
    recipe = load_config([FOLDER / "recipes" / f"{name}.yaml"]).model_dump()
    assert config_differences(load_config([]).model_dump(), recipe, ("train.amp",)) == DEPARTURES[name]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_known_by_its_config(name):
    protocol, recipe = FOLDER / "voc/10-1.yaml", FOLDER / "recipes" / f"{name}.yaml"
    config = load_config([protocol, recipe], ["model.pretrained=x.pth", "train.amp=bf16", "train.seed=3"])
    assert (config.data.protocol, recipe_of(config.model_dump())) == ("10-1", name)
    recorded = json.loads(json.dumps(config.model_dump()))  # as results.json has it
    assert recipe_of(recorded) == name
    recorded["train"]["epochs"] += 1
    assert recipe_of(recorded) is None
    assert recipe_of(load_config([recipe], ["data.crop=64"]).model_dump()) is None


def test_mibs_recipe_with_another_norm_that_computes_the_same_is_mibs():
    assert recipe_of(load_config([], ["model.norm=iabn"]).model_dump()) == "mib"
    assert recipe_of(load_config([], ["model.head=aspp"]).model_dump()) is None


def test_quickstart_leaves_room_for_method_and_phase():
    config = load_config([FOLDER / "quickstart.yaml", FOLDER / "methods/mib.yaml", FOLDER / "altersgd.yaml"])
    assert (config.data.crop, config.model.body, config.method.name) == (64, "resnet_tiny", "mib")


# -------------------------------------------------------------------------------------------------- what wins


def test_later_layers_win_and_the_command_line_wins_over_all(overlay):
    first = overlay("optim: {lr: 1, power: 1}\ntrain: {seed: 1}", "first.yaml")
    second = overlay("optim: {lr: 2}\ntrain: {seed: 2}", "second.yaml")
    config = load_config([first, second], ["train.seed=3"])
    assert (config.optim.lr, config.optim.power, config.train.seed) == (2.0, 1.0, 3)
    assert load_config([second, first]).optim.lr == 1


def test_lists_replace_and_options_merge(overlay):
    path = overlay(
        "data: {evaluate: full, evaluate_scales: [0.5, 1.0]}\nmethod: {options: {decay: 0.5, every: 3}}"
    )
    config = load_config([path], ["method.options.decay=0.9", "data.evaluate_scales=[2]"])
    assert config.data.evaluate_scales == (2.0,)
    assert config.method.options == {"decay": 0.9, "every": 3}


def test_an_override_may_hold_a_group():
    assert load_config([], ["optim={lr: 1, momentum: 0.5}"]).optim.momentum == 0.5


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("1", 1.0), ("1.", 1.0), ("+.5E+1", 5.0), ("0x10", 16.0), ("010", 10.0)],
)
def test_numbers_are_read_as_in_yaml_1_2(text, value):
    lr = load_config([], [f"optim.lr={text}"]).optim.lr
    assert isinstance(lr, float) and lr == value


@pytest.mark.parametrize("text", ["on", "off", "yes", "no", "1:30", "2020-01-01", "15-1", "1_000", "25/30"])
def test_other_scalars_are_text(text):
    assert load_config([], [f"run.name={text.replace('/', '-')}"]).run.name == text.replace("/", "-")
    assert yaml_core.parse(text) == text


@pytest.mark.parametrize(
    ("text", "p"), [("25/30", 25 / 30), ("0", 0.0), ("1", 1.0), ("0.5", 0.5), ("0/3", 0.0)]
)
def test_p_is_a_number_or_a_fraction(text, p):
    config = load_config([], [f"phase.p={text}"])
    assert isinstance(config.phase.p, float) and config.phase.p == p


def test_own_steps_replace_the_protocol_of_an_earlier_layer():
    config = load_config([FOLDER / "voc/15-1.yaml"], ["data.steps=[[cat, dog], [5]]"])
    assert config.data.steps == (("cat", "dog"), (5,))
    assert config.data.protocol is None, "a strength published for 15-1 must not apply"


def test_an_order_beside_own_steps_is_refused(overlay):
    (problem,) = problems("data.steps=[[1], [2]]", "data.order=3")
    assert "data.order: 3 cannot be given together with data.steps" in problem


def test_runs_of_other_orders_and_partitions_have_folders_of_their_own():
    orders = ("null", "0", "1", str([*range(20, 0, -1)]), str([20, *range(1, 20)]))
    names = [run_name(load_config([], [f"data.order={order}"]).model_dump()) for order in orders]
    splits = ["data.mode=partitioned"], ["data.mode=partitioned", "data.split_seed=1"]
    names += [run_name(load_config([], split).model_dump()) for split in splits]
    assert len(set(names)) == len(names) and names[0] == "voc_15-1_disjoint_ft_seed42"


def test_a_protocol_replaces_the_steps_of_an_earlier_layer(overlay):
    config = load_config([overlay("data: {steps: [[1], [2]]}")], ["data.protocol=15-5"])
    assert (config.data.protocol, config.data.steps) == ("15-5", None)


def test_config_is_frozen():
    with pytest.raises(ValueError):
        load_config([]).optim.lr = 1.0


# --------------------------------------------------------------------------------------------------- problems


HALVES = "is not one of iteration, epoch or a number of iterations from 1 on"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optim.lrr=1", "optim.lrr: unknown key (did you mean optim.lr?)"),
        ("optimizer.lr=1", "optimizer.lr: unknown key (did you mean optim.lr?)"),
        ("lr=1", "lr: unknown key (did you mean phase.lr or optim.lr?)"),
        ("optim.lr.x=1", "optim.lr.x: unknown key (did you mean optim.lr?)"),
        ("--train.seed=1", "--train.seed: unknown key (did you mean train.seed?)"),
        ("zzz=1", "zzz: unknown key"),
        ("train.seed", "'train.seed': an override is written key.sub=value"),
        ("=1", "'=1': an override is written key.sub=value"),
        ("optim=3", "optim: 3 is not a group of keys"),
        ("data.root=@x", "data.root: '@x' is not valid YAML"),
        ("train.amp=fp8", "train.amp: 'fp8' is not one of off, bf16, fp16"),
        ("train.amp=false", "train.amp: false is not one of off, bf16, fp16"),
        (
            "data.mode=overlaped",
            "data.mode: 'overlaped' is not one of disjoint, overlapped, sequential, partitioned (did you "
            "mean overl",
        ),
        ("model.output_stride=32", "model.output_stride: 32 is not one of 8, 16"),
        ("optim.lr='1e-3'", "optim.lr: '1e-3' is not a number but text"),
        ("optim.lr=true", "optim.lr: true is not a number"),
        ("optim.lr=", "optim.lr: null is not a number"),
        ("optim.lr=0", "optim.lr: 0 should be greater than 0"),
        ("optim.lr=.nan", "optim.lr: nan is not a finite number"),
        ("optim.lr=1e999", "optim.lr: inf is not a finite number"),
        ("optim.momentum=1", "optim.momentum: 1 should be less than 1"),
        ("optim.momentum=0", "optim.nesterov: true needs optim.momentum above 0"),
        ("train.epochs=1.5", "train.epochs: 1.5 is not a whole number"),
        ("train.seed=true", "train.seed: true is not a whole number"),
        ("train.seed=-1", "train.seed: -1 should be greater than or equal to 0"),
        ("train.evaluate_only=yes", "train.evaluate_only: 'yes' is not true or false but text"),
        ("run.name=12", "run.name: 12 is not text"),
        ("run.name=../x", "run.name: '../x' cannot be the name of a folder"),
        ("data.root=''", "data.root: the text is empty"),
        ("data.crop=0", "data.crop: 0 should be greater than or equal to 1"),
        ("data.scale=[1]", "data.scale: [1] has too few values"),
        ("data.scale=[1, 2, 3]", "data.scale: [1, 2, 3] has more than 2 values"),
        ("data.scale=[2, x]", "data.scale[1]: 'x' is not a number but text"),
        ("data.scale=[2, 1]", "data.scale: [2, 1] should be [smallest, largest]"),
        ("data.evaluate_scales=[0.5, 1]", "data.evaluate_scales: [0.5, 1] needs data.evaluate full or slide"),
        ("data.evaluate_scales=[]", "data.evaluate_scales: [] is empty"),
        ("data.evaluate_scales=[0]", "data.evaluate_scales[0]: 0 should be greater than 0"),
        ("data.evaluate_flip=true", "data.evaluate_flip: true needs data.evaluate full or slide"),
        ("data.protocol=15-5s", "data.protocol: '15-5s' is not one of offline, 19-1, 15-5, 15-1, 10-10"),
        ("data.protocol=null", "data.steps: is null and so is data.protocol"),
        ("data.dataset=ade", "data.protocol: '15-1' is not one of offline, 100-50"),
        ("data.dataset=folder", "data.steps: is required with data.dataset folder"),
        ("data.steps=[[1], []]", "data.steps[1]: [] is empty"),
        ("data.steps=[[1], [0]]", "data.steps[1][0]: 0 is no class id"),
        ("data.steps=[[1], [true]]", "data.steps[1][0]: true is neither the name nor the id of a class"),
        ("data.steps=[[a], [b, a]]", "data.steps: [['a'], ['b', 'a']] learns a class twice: a"),
        (
            "data.order=-1",
            "data.order: -1 is neither a seed (a whole number from 0 on) nor a list of classes",
        ),
        ("data.order=true", "data.order: true is neither a seed"),
        ("data.order=[1, 2, 1]", "data.order: [1, 2, 1] learns a class twice: 1"),
        ("data.order=[1, 0]", "data.order: [1, 0] is no class id"),
        ("data.order=[1, 2]", "data.order: [1, 2] has 2 classes, the protocol 15-1 has 20: name each once"),
        (
            f"data.order={[*range(2, 22)]}",
            "data.order: [2, 3, 4, 5, 6, 7, 8, 9, ...] has a class 21; the ids are 1 to 20",
        ),
        ("data={steps: [[1]], protocol: 15-1}", "data.steps: cannot be given together with data.protocol"),
        ("train.last_step=6", "train.last_step: 6 does not exist: the steps are 0 to 5"),
        ("train.first_step=6", "train.first_step: 6 does not exist: the steps are 0 to 5"),
        ("train={first_step: 2, last_step: 1}", "train.last_step: 1 is before train.first_step 2"),
        ("train.accumulate=5", "train.batch_size: 24 cannot be divided by train.accumulate 5"),
        ("phase.p=31/30", "phase.p: '31/30' is not between 0 and 1"),
        ("phase.p=1/0", "phase.p: '1/0' is not between 0 and 1"),
        ("phase.p=-1/3", "phase.p: '-1/3' is not a number but text"),
        ("phase.p=1.1", "phase.p: 1.1 should be less than or equal to 1"),
        ("phase.flip=R", "phase.flip: 'R' is not one of seg, all"),
        ("phase.every=0", f"phase.every: 0 {HALVES}"),
        ("phase.every=-3", f"phase.every: -3 {HALVES}"),
        ("phase.every=half", f"phase.every: 'half' {HALVES}"),
        ("phase.every=true", f"phase.every: true {HALVES}"),
        ("phase.every=false", f"phase.every: false {HALVES}"),
        ("phase.every=1.5", f"phase.every: 1.5 {HALVES}"),
        ("phase.every=2.0", f"phase.every: 2.0 {HALVES}"),
        ("phase.every='3'", f"phase.every: '3' {HALVES}"),
        ("phase.every=null", f"phase.every: null {HALVES}"),
        ("phase.every=[1]", f"phase.every: [1] {HALVES}"),
        (
            "phase={name: consolidate, flip: all}",
            "phase.flip: 'all' is not for phase.name consolidate, which is the control of seg; those of all "
            "are pause and stop",
        ),
        ("model.dilations=6", "model.dilations: 6 is not a list"),
        ("method.options=3", "method.options: 3 is not a mapping"),
        (
            "method.options.decay=.inf",
            "method.options: {'decay': inf} has an option 'decay' that is no finite number",
        ),
        ("method.options.a.b={c: 1}", "method.options: {'a.b': {'c': 1}} has an option 'a.b' that is no"),
    ],
)
def test_one_problem_in_plain_words(override, expected):
    found = problems(override)
    assert len(found) == 1 and found[0].startswith(expected) and found[0].endswith("[command line]"), found


def test_train_list_is_of_voc_alone():
    (found,) = problems("data.train_list=train", overlays=[FOLDER / "ade/100-10.yaml"])
    assert found.startswith("data.train_list: 'train' exists for data.dataset voc only")


def test_the_nickname_of_15_1_is_known():
    assert "did you mean 15-1?" in problems("data.protocol=15-5s")[0]


def test_choices_of_the_caller():
    methods, bodies = Registry("method.name", "methods.losses"), Registry("model.body", "methods.losses")
    for registry, names in ((methods, METHODS), (bodies, ["resnet101"])):
        for name in names:
            registry.register(name)(object)
    assert problems("method.name=mip", "model.body=resnet", registries=[methods, bodies]) == [
        "method.name: 'mip' is not one of ewc, ft, ilt, lwf, lwf_mc, mib, pi, plop, rw (did you mean mib?) "
        "[command line]",
        "model.body: 'resnet' is not one of resnet101 (did you mean resnet101?) [command line]",
    ]


def test_all_problems_at_once_each_with_its_source(overlay):
    path = overlay("optim: {lrr: 1, lr: fast}\nunheard_of: 1\ntrain: {accumulate: 5}")
    assert problems("train.amp=fp8", "run.pictures=-1", overlays=["/no/where.yaml", path]) == [
        "/no/where.yaml: no such file",
        f"optim.lrr: unknown key (did you mean optim.lr?) [{path}]",
        f"unheard_of: unknown key [{path}]",
        f"optim.lr: 'fast' is not a number but text [{path}]",
        "train.amp: 'fp8' is not one of off, bf16, fp16 [command line]",
        "run.pictures: -1 should be greater than or equal to 0 [command line]",
    ]


def test_a_rule_names_every_source_it_rests_on(overlay):
    path = overlay("train: {batch_size: 8}")
    (found,) = problems("train.accumulate=3", overlays=[path])
    assert found == f"train.batch_size: 8 cannot be divided by train.accumulate 3 [{path}, command line]"


def test_all_of_the_loss_may_be_flipped_under_any_phase_but_consolidate():
    for phase in ("descent", "altersgd", "pause", "stop"):
        assert load_config([], [f"phase.name={phase}", "phase.flip=all"]).phase.flip == "all"
    (found,) = problems("phase.flip=all", overlays=[FOLDER / "consolidate.yaml"])
    assert found.endswith(f"pause and stop [{FOLDER / 'consolidate.yaml'}, command line]")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is empty, but an overlay is a mapping"),
        ("# only a comment", "is empty, but an overlay is a mapping"),
        ("- 1", "holds [1], but an overlay is a mapping"),
        ("a: [", "not a valid YAML file (line 1, column 5: "),
        (
            "train: {seed: 1}\ntrain: {seed: 2}",
            "not a valid YAML file (line 2, column 1: the key 'train' occurs twice)",
        ),
        ("1: 2", "not a valid YAML file (line 1, column 1: the key 1 is not text)"),
        (
            "train: &a {seed: 1}\nrun: *a",
            "not a valid YAML file (line 2, column 6: aliases (*name) are not supported)",
        ),
        ("train: !!python/name:os.system x", "not a valid YAML file (line 1, column 8: could not determine"),
    ],
)
def test_unreadable_overlays(overlay, text, expected):
    path = overlay(text)
    (found,) = problems(overlays=[path])
    assert found.startswith(f"{path}: {expected}"), found


def test_words_that_were_meant_as_an_override():
    assert problems(overlays=["train.epochs", "1"]) == [
        "train.epochs: no such file (an override is written key.sub=value)",
        "1: no such file (an override is written key.sub=value)",
    ]


def test_overlays_that_are_no_text_files(tmp_path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    found = problems(overlays=[tmp_path, tmp_path / "binary.yaml", "configs/voc/15-15.yaml"])
    assert [problem.partition(": ")[0] for problem in found] == [
        str(tmp_path),
        str(tmp_path / "binary.yaml"),
        "configs/voc/15-15.yaml",
    ]
    assert (
        "did you mean configs/voc/15-5.yaml?" in found[2] or "did you mean configs/voc/15-1.yaml?" in found[2]
    )


def test_dotted_keys_in_a_file_are_explained(overlay):
    (found,) = problems(overlays=[overlay("optim.lr: 0.1")])
    assert found.startswith(
        "optim.lr: dotted keys are for the command line, write 'optim: {lr: ...}' in a file"
    )


# -------------------------------------------------------------------------------------- dumps and differences


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["phase.p=25/30", "optim.weight_decay=1e-7", "run.checkpoint_minutes=0.1"],
        ["data.dataset=folder", "data.steps=[[cat, 3], ['4']]", "data.root='1e-3'"],
        ["method.options={a: [1, x, null], b: off, c: '1', d: 'true', e: 1e-9}", "model.dilations=[1, 2, 3]"],
    ],
)
def test_dump_reads_back_to_an_equal_config(overlay, overrides):
    config = load_config([], overrides)
    assert load_config([overlay(dump_config(config))]) == config


def test_differences_are_dotted_and_sorted():
    old = {"optim": {"lr": 0.01, "nesterov": True}, "data": {"scale": (0.5, 2.0), "root": None}, "gone": 1}
    new = {
        "optim": {"lr": 0.02, "nesterov": True},
        "data": {"scale": [0.5, 2.0], "root": "x"},
        "method": {"a": 1},
    }
    assert config_differences(old, new) == [
        "data.root: null -> 'x'",
        "gone: 1 -> not set",
        "method.a: not set -> 1",
        "optim.lr: 0.01 -> 0.02",
    ]


def test_a_config_does_not_differ_from_its_dump():
    config = load_config([], ["data.evaluate=full", "data.evaluate_scales=[1, 2]"])
    assert config_differences(config.model_dump(), yaml_core.parse(dump_config(config))) == []


def test_the_schema_does_not_import_torch():
    code = "import sys, configs; configs.load_config([]); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=FOLDER.parent, check=True)
