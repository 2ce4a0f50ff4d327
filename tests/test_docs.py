"""The documents cannot rot: their commands parse, their links and keys exist, their worked example runs."""

import argparse
import importlib
import importlib.util
import inspect
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch.distributed.run as torchrun
import yaml

import train
from configs.layers import Layers
from configs.schema import ConfigError, load_config
from data.official import STEP_SIZES
from data.protocols import PROTOCOLS
from engine.arguments import read_config
from methods import AVERAGES, METHODS, UPDATES
from scripts import compare, reproduce
from scripts.dev import protocol_picture as drawn

ROOT = Path(train.__file__).parent
DOCUMENTS = sorted(
    path
    for place in ("*.md", "docs/*.md", "examples/*.md", "results/*/README.md")
    for path in ROOT.glob(place)
)
EXAMPLE = ROOT / "docs/adding-a-method.md"
FIRST_LINE_OF_A_SCRIPT = "#!"
NOT_OURS = {"cd", "export", "git", "pip", "pre-commit", "sbatch", "sed", "squeue", "tensorboard"}
WITH_PATCH = "<!-- with the patch -->"  # stands before commands that need the worked example's files


# ---- reading a document ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A fenced piece of a document; `line` is that of its first line."""

    language: str
    line: int
    text: str
    before: str  # the line above the fence


@cache
def split(path: Path) -> tuple[tuple[Block, ...], str]:
    """The fenced blocks of a document, and its text with empty lines in their place."""
    blocks, prose, fence = [], [], None
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        prose.append("")
        if fence is None and line.startswith("```"):
            fence = number
        elif fence is not None and line.startswith("```"):
            above = lines[fence - 2] if fence > 1 else ""
            blocks.append(
                Block(lines[fence - 1][3:].strip(), fence + 1, "\n".join(lines[fence : number - 1]), above)
            )
            fence = None
        elif fence is None:
            prose[-1] = line
    assert fence is None, f"{path}: the block that opens in line {fence} is never closed"
    return tuple(blocks), "\n".join(prose)


def commands(block: Block) -> list[tuple[int, list[str]]]:
    """Line and words of each command of a shell block: comments left out, continued lines joined, && and |
    split."""
    found, words, first = [], [], None
    if block.text.startswith(FIRST_LINE_OF_A_SCRIPT):  # what it launches: the rest is shell
        launched = re.findall(
            r"torchrun [^&]*", re.sub(r"\$(\w+|\(\(.*?\)\))", "1", block.text.replace("\\\n", ""))
        )
        return [(block.line, shlex.split(command)) for command in launched]
    for number, line in enumerate(block.text.splitlines(), start=block.line):
        first = first or number
        words += shlex.split(line.removesuffix("\\"), comments=True)
        if line.endswith("\\"):
            continue
        while words:
            end = next((i for i, word in enumerate(words) if word in ("&&", "|", ";")), len(words))
            found.append((first, words[:end]))
            words = words[end + 1 :]
        first = None
    return found


def in_documents(find) -> list:
    """Parameters of a test: (document, what was found), named by document and line."""
    return [
        pytest.param(path, item, id=f"{path.relative_to(ROOT)}:{line}")
        for path in DOCUMENTS
        for line, item in find(path)
    ]


def shell_commands(path: Path) -> list[tuple[int, list[str]]]:
    found = [
        command
        for block in split(path)[0]
        if block.language == "bash" and block.before != WITH_PATCH
        for command in commands(block)
    ]
    for block in split(path)[0]:
        for number, line in enumerate(block.text.splitlines(), start=block.line):
            if line.startswith("$ "):  # with its output
                found.append((number, shlex.split(line[2:])))
    for line, code in inline_code(path):
        whole = "..." not in code and "<tool>" not in code
        if whole and re.match(r"(python|bash|torchrun) ", code) and len(code.split()) > 3:
            found.append((line, shlex.split(code)))
    return found


def inline_code(path: Path) -> list[tuple[int, str]]:
    lines = enumerate(split(path)[1].splitlines(), start=1)
    return [(number, code) for number, line in lines for code in re.findall(r"`([^`]+)`", line)]


# ---- commands ----------------------------------------------------------------------------------------------


class Parsed(Exception):
    """Raised in place of what would follow the parsing of arguments."""


def check_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails, as the program would, on arguments that it does not take. Nothing is run."""
    words = words[next(i for i, word in enumerate(words) if not re.match(r"\w+=", word)) :]  # VARIABLE=value
    program, *arguments = words
    ranks = 1
    if program == "torchrun":
        given = torchrun.get_args_parser().parse_args(arguments)
        ranks = int(given.nnodes.split(":")[-1]) * int(given.nproc_per_node)
        program, arguments = "python", [given.training_script, *given.training_script_args]
    if program == "python" and arguments[0] == "train.py":
        if arguments[1:] != ["--help"]:
            check_training(arguments[1:], ranks)
    elif program == "python" and arguments[0] == "-m":
        check_module(arguments[1], arguments[2:], monkeypatch)
    elif program == "python" and arguments[0] == "-c":
        compile(arguments[1], "<command>", "exec")
    elif program == "bash":
        check_script(*arguments)
    else:
        assert program in NOT_OURS, f"{' '.join(words)}: a program that this test does not know"


def check_training(arguments: list[str], ranks: int = 1) -> None:
    batch = read_config(arguments).train
    assert batch.batch_size % (ranks * batch.accumulate) == 0, (
        f"{batch.batch_size} images cannot be shared out among {ranks} ranks"
    )


def check_module(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if not name.startswith(("scripts.", "data.")):
        assert importlib.util.find_spec(name), f"there is no module {name}"
        return
    main = importlib.import_module(name).main
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_stop(*args, **kwargs):
        parse_args(*args, **kwargs)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(Parsed):
        main(arguments) if inspect.signature(main).parameters else main()


def check_script(script: str, *arguments: str) -> None:
    assert (ROOT / script).is_file(), f"there is no {script}"
    dataset, _, protocol = Path(script).stem.partition("_")
    if protocol in PROTOCOLS.get(dataset, {}) and arguments[:1] != ("--help",):
        root, *rest = arguments
        check_training([f"configs/{dataset}/{protocol}.yaml", f"data.root={root}", *rest])


@pytest.mark.parametrize(("path", "words"), in_documents(shell_commands))
def test_commands_are_taken(path, words, monkeypatch):
    monkeypatch.chdir(ROOT)
    try:
        check_command(words, monkeypatch)
    except SystemExit as error:
        pytest.fail(f"{' '.join(words)}: its parser refuses it (exit code {error.code})")
    except ConfigError as error:
        pytest.fail(f"{' '.join(words)}:\n{error}")


def plans(path: Path) -> list[tuple[int, list[str]]]:
    return [(line, words[3:]) for line, words in shell_commands(path) if words[2:3] == ["scripts.reproduce"]]


@pytest.mark.parametrize(("path", "arguments"), in_documents(plans))
def test_plans_can_be_made(path, arguments, tmp_path, monkeypatch, capsys):
    """The overrides of scripts.reproduce are read after its arguments."""
    monkeypatch.chdir(ROOT)
    elsewhere = ["--dry-run", "--root", f"{tmp_path}/none", "--runs", f"{tmp_path}/runs"]
    assert reproduce.main([*arguments, *elsewhere]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        "python train.py configs/voc/15-1.yaml configs/methods/mob.yaml",
        "python train.py optim.lrr=1",
        "torchrun --processes=8 train.py configs/voc/15-1.yaml",
        "torchrun --nproc_per_node=8 train.py phase.momentum=of",
        "torchrun --nnodes=2 --nproc_per_node=8 train.py configs/voc/15-1.yaml",
        "python -m scripts.reproduce table7 --preset voc",
        "python -m scripts.status runs --wach 30",
        "python -m data.shapes",
        "python -m scripts.nothing",
        "bash scripts/nothing.sh",
        "VARIABLE=1 bash scripts/voc_15-1.sh /data configs/methods/mob.yaml",
        "something else",
    ],
)
def test_wrong_commands_are_noticed(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises((SystemExit, ConfigError, AssertionError, ImportError)):
        check_command(shlex.split(command), monkeypatch)


# ---- links and keys ----------------------------------------------------------------------------------------


def links(path: Path) -> list[tuple[int, str]]:
    lines = enumerate(split(path)[1].splitlines(), start=1)
    found = [(number, link) for number, line in lines for link in re.findall(r"\]\(([^)\s]+)\)", line)]
    return [(number, link) for number, link in found if not re.match(r"\w+:", link)]


def anchors(path: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", split(path)[1], flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(("path", "link"), in_documents(links))
def test_links_lead_somewhere(path, link):
    place, _, anchor = link.partition("#")
    target = (path.parent / place).resolve() if place else path
    assert target.exists(), f"{target} does not exist"
    assert not anchor or anchor in anchors(target), f"{target} has no heading for #{anchor}"


SECTIONS = "|".join(Layers().tree)
KEY = re.compile(rf"(?<![\w/.-])((?:{SECTIONS})\.[a-z_]+)(\*|[\w.]*)(?:=([^\s`]*))?")


def keys(path: Path) -> list[tuple[int, tuple[str, str, str]]]:
    """Config keys in `code`, with what follows their name and the value given to them."""
    found = []
    for number, code in inline_code(path) if path.name != "CHANGELOG.md" else ():  # which names what was
        if code.startswith(("python", "torchrun", "bash")):
            continue  # tested above
        found += [(number, match.groups()) for match in KEY.finditer(code) if not is_file_or_module(match[1])]
    return found


def is_file_or_module(name: str) -> bool:
    return name.endswith((".py", ".txt", ".safetensors")) or (ROOT / f"{name.replace('.', '/')}.py").is_file()


@pytest.mark.parametrize(("path", "found"), in_documents(keys))
def test_keys_exist_and_take_the_value(path, found):
    key, rest, value = found
    known = Layers().keys
    if rest == "*":
        assert any(name.startswith(key) for name in known), f"no key begins with {key}"
        return
    assert key in known, f"{key} is no key of configs/base.yaml"
    if value and not re.search(r"[<>]|\.\.\.", value) and not rest:
        with_others = [
            f"{key}={value}",
            *(["data.evaluate=full"] if key.startswith("data.evaluate_") else []),
            *(["data.void=ignore"] if key == "data.background" else []),
        ]
        load_config([], with_others)


@cache
def sources(*patterns: str) -> str:
    """Python files as one text, in which a string that goes over several lines is whole."""
    texts = [path.read_text(encoding="utf-8") for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(texts))


def named_tests(path: Path) -> list[tuple[int, str]]:
    return [(line, code) for line, code in inline_code(path) if re.fullmatch(r"test_\w+", code)]


@pytest.mark.parametrize(("path", "name"), in_documents(named_tests))
def test_tests_that_are_named_exist(path, name):
    assert f"def {name}(" in sources("tests/*.py")


def messages(path: Path) -> list[tuple[int, str]]:
    """Of our own programs: the first column of the first table of troubleshooting.md."""
    section = (
        split(path)[1].partition("## From torch")[0].splitlines() if path.name == "troubleshooting.md" else []
    )
    cells = [(number, re.match(r"\| `([^`]+)` \|", line)) for number, line in enumerate(section, start=1)]
    return [(number, cell[1]) for number, cell in cells if cell]


@pytest.mark.parametrize(("path", "message"), in_documents(messages))
def test_messages_are_those_of_the_code(path, message):
    rooms = ("configs", "data", "engine", "methods", "metrics", "models", "scripts", "study", "tracking")
    code = sources("train.py", *(f"{room}/**/*.py" for room in rooms))
    for part in filter(None, (part.strip(" :()") for part in message.split("..."))):
        assert part in code, f"no message says {part!r}"


@pytest.mark.parametrize(
    ("test", "wrong"),
    [
        (test_links_lead_somewhere, "nothing.md"),
        (test_links_lead_somewhere, "../README.md#nothing"),
        (test_keys_exist_and_take_the_value, ("train.epoch", "", None)),
        (test_keys_exist_and_take_the_value, ("train.evaluation_", "*", None)),
        (test_keys_exist_and_take_the_value, ("phase.momentum", "", "of")),
        (test_tests_that_are_named_exist, "test_nothing"),
        (test_messages_are_those_of_the_code, "... holds a run with the same config"),
    ],
)
def test_what_is_wrong_is_noticed(test, wrong):
    with pytest.raises((AssertionError, ConfigError)):
        test(EXAMPLE, wrong)


# ---- what single documents say -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_is_described(name):
    assert re.search(rf"^### `{name}`", split(ROOT / "docs/methods.md")[1], flags=re.MULTILINE)


def test_the_index_lists_every_document():
    listed = {link for _, link in links(ROOT / "docs/README.md")}
    assert {path.name for path in ROOT.glob("docs/*.md")} - {"README.md"} <= listed


def test_altersgd_is_quoted_from_the_code():
    code = {line.strip() for line in sources("engine/*.py", "methods/phases/altersgd.py").splitlines()}
    blocks = [block for block in split(ROOT / "docs/altersgd.md")[0] if block.language == "python"]
    assert len(blocks) == 2
    for line in "\n".join(block.text for block in blocks).splitlines():
        assert line.strip() in code


def test_altersgd_is_measured_as_printed(capsys, monkeypatch):
    path = ROOT / "docs/altersgd.md"
    ((_, words),) = [command for command in shell_commands(path) if "scripts.compare" in command[1]]
    monkeypatch.chdir(ROOT)
    assert compare.main(words[3:]) == 0
    assert f"<!-- measured: quickstart -->\n{capsys.readouterr().out}" in path.read_text(encoding="utf-8")


def tables(path: Path) -> list[list[str]]:
    rows = [line.strip("|").split("|") for line in split(path)[1].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows]


def test_protocols_are_all_listed_with_their_steps():
    listed = [row for row in tables(ROOT / "docs/protocols.md") if len(row) == 4 and row[0].startswith("`")]
    listed = [(re.match(r"`([\w-]+)`", row[0])[1], row[1], row[3]) for row in listed if row[3].isdigit()]
    expected = [
        (name, f"1-{steps[0][-1]}", str(len(steps)))
        for protocols in PROTOCOLS.values()
        for name, steps in protocols.items()
    ]
    assert listed == expected


def test_published_counts_are_those_of_the_code():
    rows = {
        row[0]: tuple(int(n) for n in row[1:] if n)
        for row in tables(ROOT / "docs/protocols.md")
        if row[1:] and re.fullmatch(r"[\d-]+ (disjoint|overlapped|test)", row[0])
    }
    known = {f"{protocol} {mode}": sizes for (_, _, protocol, mode), sizes in STEP_SIZES.items()}
    assert len(rows) == 7 and rows == {name: known[name] for name in rows}


@pytest.mark.slow
def test_the_protocol_picture_shows_what_it_says():
    both = drawn.find_example("old + new", ("new", "old"))
    later = drawn.find_example("new + future", ("new", "future"))
    (old,) = both.classes - {18}
    assert old < 18 and later.classes - {18} <= {19, 20}
    shown = {mode: drawn.labels_in_training(both, mode) for mode in drawn.MODES}
    for mode in ("disjoint", "overlapped"):
        assert set(shown[mode].flat) == {0, 18}
    assert set(shown["sequential"].flat) == {0, old, 18}
    assert [drawn.labels_in_training(later, mode) is None for mode in drawn.MODES] == [False, True, True]
    assert set(drawn.labels_in_testing(later).flat) == {0, 18, 255}


@pytest.mark.slow
def test_the_protocol_picture_is_drawn(tmp_path):
    assert drawn.main([str(tmp_path / "new" / "picture.png")]) == 0
    assert (tmp_path / "new" / "picture.png").read_bytes().startswith(b"\x89PNG")


STAND_INS = {
    "srun": """echo $$ >pid; shift; exec "$@" """,
    "scancel": """echo "scancel $*" >>calls; kill -TERM $(cat pid)""",
    "scontrol": """[ "$1" = show ] && echo "PreemptTime=None" || echo "$*" >>calls""",
    "torchrun": """trap 'sleep 0.3; echo saved >>calls; exit 1' TERM
echo "$*" >>calls; if [ -e quick ]; then exit 3; fi; for i in {1..400}; do sleep 0.05; done""",
}


@pytest.mark.parametrize("told", [True, False])
def test_the_slurm_script_saves_and_queues_again(told, tmp_path):
    (block,) = [b for b in split(ROOT / "docs/running.md")[0] if b.text.startswith(FIRST_LINE_OF_A_SCRIPT)]
    (tmp_path / "job.sh").write_text(block.text)
    (tmp_path / "bin").mkdir()
    for name, text in STAND_INS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    if not told:
        (tmp_path / "quick").touch()
    slurm = {"SLURM_JOB_ID": "2007", "SLURM_NNODES": "2", "SLURM_CPUS_PER_TASK": "32"}
    environment = os.environ | slurm | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    job = subprocess.Popen(["bash", "job.sh"], cwd=tmp_path, env=environment)
    calls = tmp_path / "calls"
    try:
        patience = time.monotonic() + 20
        while not calls.exists() and time.monotonic() < patience:
            time.sleep(0.02)
        if told:
            job.terminate()
        code = job.wait(timeout=20)
    finally:
        job.kill()
    launched, *later = calls.read_text().splitlines()
    assert "--nnodes=2" in launched and f"--rdzv-endpoint={platform.node()}:29407" in launched
    assert (code, later) == (
        (143, ["scancel --signal=TERM 2007", "saved", "requeue 2007"]) if told else (3, [])
    )


def test_the_citation_is_readable():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors", "date-released"} <= citation.keys()
    assert f"\n## {citation['version']}" in (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert f"# {citation['title']}\n" in (ROOT / "README.md").read_text("utf-8")
    assert "2107.05804" in citation["preferred-citation"]["url"] in (ROOT / "README.md").read_text("utf-8")


# ---- the README --------------------------------------------------------------------------------------------

README = ROOT / "README.md"
LINES_AT_MOST, NUMBERS_AT_MOST = 150, 3


def numbers(paragraph: str) -> list[str]:
    """Return the numbers of a paragraph, but for those in code, links and names (ResNet-101, 15-1, dates)."""
    words = re.sub(r"`[^`]*`|\]\([^)]*\)", " ", paragraph)
    return re.findall(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?(?![\w-])", words)


def test_the_readme_is_short_and_in_order():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LINES_AT_MOST
    parts = [
        *("has it run?", "**rehearsed, not run**", "## Two commands", "](docs/quickstart.png)"),
        *("## Results", "| background |", "](docs/results.md)", "## VOC on one, two, eight GPUs"),
        *("## Add a method", "```diff", "## Methods", "verified by", "## What a researcher asks"),
    ]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert text.splitlines().index("## Two commands") <= 20  # what has run is on the first screen
    paragraphs = [
        part for part in split(README)[1].split("\n\n") if not part.strip().startswith(("|", "<!--"))
    ]
    crowded = [part for part in paragraphs if len(numbers(part)) > NUMBERS_AT_MOST]
    assert not crowded, crowded[0]


def test_numbers_are_counted():
    text = "On 3 seeds 12.5 ± 0.3, of 10,582 images; `seed=4`, [more](5.md), 15-1, ResNet-101, 2026-11-18."
    assert numbers(text) == ["3", "12.5", "0.3", "10,582"]


def test_the_readme_names_every_method_and_what_fits_on_a_gpu():
    rows = [line for line in README.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    named = {name for line in rows for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert set(METHODS) | set(UPDATES) | set(AVERAGES) <= named | {"plain", "none"}
    fits = [line for line in rows if re.match(r"\| \d+ GB ", line)]
    plan = (ROOT / "docs/performance.md").read_text(
        encoding="utf-8"
    )  # which tests/test_gpu_plan.py counts anew
    assert len(fits) == 3 and all(f"\n{line}\n" in plan for line in fits)


# ---- the worked example ------------------------------------------------------------------------------------


@pytest.fixture
def example(tmp_path, monkeypatch) -> Path:
    """A folder with the files that the patches of the document make; its method is registered for this test
    only."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed: it applies the patches of the document")
    for block in split(EXAMPLE)[0]:
        if block.language == "diff":
            command = ["git", "apply", "--whitespace=error", "-"]
            applied = subprocess.run(
                command, input=f"{block.text}\n", cwd=tmp_path, capture_output=True, text=True
            )
            assert applied.returncode == 0, f"{EXAMPLE.name}:{block.line}: {applied.stderr}"
    (source,) = (tmp_path / "methods").glob("*.py")
    module = load(source, f"methods.{source.stem}", monkeypatch)
    (name,) = [name for name, cls in METHODS.items() if cls.__module__ == module.__name__]
    yield tmp_path
    del METHODS[name]


def load(path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_the_worked_example_trains_two_steps_under_altersgd(example, toy_arguments, tmp_path):
    (overlay,) = (example / "configs/methods").glob("*.yaml")
    overrides = ("phase.name=altersgd", "phase.p=0.5", "method.strength=null", "method.options.centred=false")
    assert train.main([str(overlay), *toy_arguments(*overrides)]) == 0
    results = yaml.safe_load((tmp_path / "runs/run/results.json").read_text())
    assert results["config"]["method"]["name"] == overlay.stem
    assert results["config"]["method"]["strength"] == 1.0
    assert [step["step"] for step in results["steps"]] == [0, 1]


def test_the_worked_examples_own_tests_pass(example, monkeypatch):
    (source,) = (example / "tests").glob("test_*.py")
    tests = [f for n, f in vars(load(source, "worked_example", monkeypatch)).items() if n.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        for centred in (False, True):
            test(centred)


def test_the_worked_examples_commands_are_taken(example, monkeypatch):
    (block,) = [block for block in split(EXAMPLE)[0] if block.before == WITH_PATCH]
    made = {str(path.relative_to(example)): str(path) for path in example.rglob("*.*")}
    monkeypatch.chdir(ROOT)
    assert len(commands(block)) == 4
    for _, words in commands(block):
        check_command([made.get(word, word) for word in words], monkeypatch)
        monkeypatch.undo()
        monkeypatch.chdir(ROOT)
