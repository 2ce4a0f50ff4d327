"""Which room may import which: leaves < engine < study < commands, and nothing imports a command."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEAVES = ("configs", "data", "models", "methods", "metrics", "tracking")
# What every leaf may know of another: steps and classes, what a user's mistake is, and how things are chosen
# by name.
VOCABULARY = {"configs.errors", "configs.registry", "data.protocols"}
# What else a leaf may know of another, and why.
BETWEEN_LEAVES = {
    "models": {"data.vision"},  # the one place that imports torchvision
    "methods": {"models.upsample"},  # how logits are enlarged: the losses do it piece by piece
    # colours and groups of classes, as they are shown, and the config, which is handed on as text
    "tracking": {"data.palette", "metrics.continual", "configs.yaml_core"},
}
ROOMS = {
    **{leaf: {leaf} for leaf in LEAVES},
    "engine": {*LEAVES, "engine"},
    "study": {*LEAVES, "engine", "study"},
    "scripts": {*LEAVES, "engine", "study", "scripts"},
    "train": {*LEAVES, "engine"},
}


def imports_of(path: Path) -> set[str]:
    """Modules of this project that a file imports anywhere, functions included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] in ROOMS}


def is_below(name: str, modules: set[str]) -> bool:
    """Whether the name is one of the modules or something that one of them holds."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def strangers(path: Path, room: str) -> list[str]:
    """What a file of the room imports and may not."""
    allowed = ROOMS[room] | (VOCABULARY | BETWEEN_LEAVES.get(room, set()) if room in LEAVES else set())
    return sorted(name for name in imports_of(path) if not is_below(name, allowed))


def files() -> list[tuple[Path, str]]:
    rooms = [(path, room) for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    return [*rooms, (ROOT / "train.py", "train")]


@pytest.mark.parametrize(("path", "room"), files(), ids=lambda value: str(value).removeprefix(f"{ROOT}/"))
def test_a_room_imports_only_what_it_may(path, room):
    assert strangers(path, room) == []


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("models", "from data.loaders import train_loader"),
        ("data", "import engine.run"),
        ("metrics", "from study import paper"),
        ("engine", "from study.plan import Run"),
        ("study", "from scripts import report"),
        ("engine", "def late():\n    import train"),
        ("train", "from study import plan"),
    ],
)
def test_a_wrong_import_is_seen(room, line, tmp_path):
    path = tmp_path / "new.py"
    path.write_text(line)
    assert strangers(path, room)


def test_no_file_is_too_long_to_read():
    long = {str(path): len(path.read_text(encoding="utf-8").splitlines()) for path, _ in files()}
    assert {path: lines for path, lines in long.items() if lines > 400} == {}
    assert long[str(ROOT / "train.py")] <= 200
