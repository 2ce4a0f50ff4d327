"""What docs/quickstart.md says of the quickstart is what the committed results of `bash
scripts/quickstart.sh` hold.
"""

from pathlib import Path

import pytest

from engine.run_folder import read_results
from scripts import compare

ROOT = Path(compare.__file__).parent.parent
PAGE = ROOT / "docs/quickstart.md"
RUNS = ("ft", "lwf", "mib", "mib-altersgd")


@pytest.fixture(scope="module")
def results() -> dict[str, list[dict]]:
    return {run: read_results(ROOT / "results/quickstart" / run / "results.json")["steps"] for run in RUNS}


def test_every_run_is_complete_and_starts_from_the_same_step_0(results):
    for steps in results.values():
        assert [step["step"] for step in steps] == list(range(6))
        assert steps[0]["iou"] == results["ft"][0]["iou"]


def test_a_network_learns_forgets_and_remembers(results):
    step_0 = results["ft"][0]["miou"]["old"]
    assert step_0 >= 0.55
    assert results["ft"][-1]["miou"]["old"] < 0.02
    assert results["mib"][-1]["miou"]["old"] >= step_0 / 2


def test_the_page_quotes_the_control():
    last = read_results(ROOT / "results/quickstart/mib-consolidate/results.json")["steps"][-1]["miou"]
    quoted = " / ".join(f"{100 * last[group]:.1f}" for group in ("old", "new", "all"))
    assert f"Consolidate, which only distils there, ends at {quoted}." in PAGE.read_text(encoding="utf-8")


def test_the_page_prints_these_results(capsys):
    folders = [str(ROOT / "results/quickstart" / run) for run in RUNS]
    assert compare.main([*folders, "--markdown"]) == 0
    assert capsys.readouterr().out.strip() in PAGE.read_text(encoding="utf-8")
    for page, picture in ((PAGE, "](quickstart.png)"), (ROOT / "README.md", "](docs/quickstart.png)")):
        assert picture in page.read_text(encoding="utf-8")
