"""Whatever is typed gives a Config, whose dump reads back, or a ConfigError: never another exception."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs import ConfigError, dump_config, load_config, yaml_core
from configs.schema import Config

KEYS = [
    f"{section}.{name}" for section, f in Config.model_fields.items() for name in f.annotation.model_fields
]

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(["15-1", "25/30", "off", "1e-3", "voc", "folder", "full", "-1/0", "'", "!!int", "&a"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from([*KEYS, *(key.split(".")[0] for key in KEYS), "method.options.x"]) | st.text(
    max_size=12
)
YAML_TEXT = st.text("-+.:,[]{}&*!?|>%@`'\"#~ \n\t\\0x1eEnuUlfF/\u00e9\ud7ff\U0001f600", max_size=30)
fuzz = settings(suppress_health_check=[HealthCheck.too_slow])


def load_or_refuse(folder, overlays, overrides):
    try:
        config = load_config(overlays, overrides)
    except ConfigError as error:
        assert error.problems and all(isinstance(problem, str) and problem for problem in error.problems)
    else:
        path = folder / "dumped.yaml"
        path.write_text(dump_config(config), encoding="utf-8")
        assert load_config([path]) == config


@fuzz
@given(
    st.lists(st.tuples(NAMES, YAML_TEXT | SCALARS.map(str)).map("=".join) | st.text(max_size=20), max_size=3)
)
def test_fuzz_overrides(tmp_path_factory, overrides):
    load_or_refuse(tmp_path_factory.getbasetemp(), [], overrides)


@fuzz
@given(
    st.dictionaries(
        st.sampled_from(list(Config.model_fields)) | st.text(max_size=5),
        st.dictionaries(st.sampled_from([key.split(".")[1] for key in KEYS]), VALUES, max_size=3) | VALUES,
        max_size=3,
    )
)
def test_fuzz_overlays(tmp_path_factory, tree):
    folder = tmp_path_factory.getbasetemp()
    path = folder / "fuzzed.yaml"
    path.write_text(yaml_core.dump(tree), encoding="utf-8")
    load_or_refuse(folder, [path], [])


@fuzz
@given(VALUES)
def test_fuzz_options_survive_the_dump(tmp_path_factory, value):
    load_or_refuse(tmp_path_factory.getbasetemp(), [], [f"method.options.x={yaml_core.dump(value)}"])


@pytest.mark.parametrize(
    "text",
    [
        *(
            "!!int ''",
            "!!float x",
            "!!bool x",
            "!!null x",
            "!!map [1]",
            "!!seq {a: 1}",
            "!!str [1]",
            "!!set {a}",
        ),
        *('"\\UFFFFFFFF"', '"\\ud800"', "\x00", "{[1]: 2}", "&a [*a]", "--- 1\n--- 2"),
        *("[" * 600, "0x" + "f" * 5000, "9" * 5000),
    ],
    ids=lambda text: repr(text[:12]),
)
def test_hostile_yaml(text):
    try:
        load_config([], [f"method.options.x={text}"])
    except ConfigError as error:
        assert len(error.problems) == 1
