"""How many files a reader has to open to follow one batch from the disk to the weights."""

import sys
from pathlib import Path

import train
from engine.watch import Watch

ROOT = Path(train.__file__).parent
MOST = 16


def test_one_batch_of_mib_with_altersgd_visits_few_files(toy_arguments, monkeypatch):
    """Files of this project in which a function runs between the ends of two iterations,
    the loader in the same process.
    """
    visited: set[str] = set()
    by_iteration = []

    def note(frame, event, argument):
        if event == "call":
            visited.add(frame.f_code.co_filename)

    after = Watch.after

    def watched(watch, *iteration):
        sys.setprofile(None)
        ours = (Path(name) for name in visited if name != __file__)
        places = (path.relative_to(ROOT) for path in ours if ROOT in path.parents)
        by_iteration.append(
            {str(place) for place in places if not place.parts[0].startswith(".")}
        )  # no .venv
        after(watch, *iteration)
        visited.clear()
        sys.setprofile(note)

    monkeypatch.setattr(Watch, "after", watched)
    settings = ("method.name=mib", "phase.name=altersgd", "phase.p=0.5", "train.epochs=1", "run.tracker=none")
    try:
        assert train.main(toy_arguments(*settings)) == 0
    finally:
        sys.setprofile(None)
    assert len(by_iteration) == 2 + 4
    batch = by_iteration[-1]
    assert by_iteration[-2] == batch  # a descent and an ascent
    assert {"data/images.py", "models/segmenter.py", "methods/mib.py", "engine/step.py"} <= batch
    assert len(batch) <= MOST, sorted(batch)
    document = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    assert f"a batch of MiB with AlterSGD visits {len(batch)} files" in document
    assert [file for file in sorted(batch) if file not in the_way_of(document)] == []


def the_way_of(document: str) -> str:
    return document.partition("## The way of one batch")[2].partition("\n## ")[0]
