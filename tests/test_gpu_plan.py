"""scripts.gpu_plan: counted on paper as well, and the documents quote it."""

from pathlib import Path

import pytest
import torch
from torch import nn

from models.segmenter import build_segmenter
from scripts import gpu_plan
from scripts.benchmarks.counting import Tally, count_iteration
from scripts.benchmarks.measure import saved_bytes
from scripts.benchmarks.memory import network

DOCUMENT = Path(gpu_plan.__file__).parent.parent / "docs/performance.md"


def test_operations_are_two_per_weight_and_place_of_each_convolution():
    counted = gpu_plan.count()
    with torch.device("meta"):
        model = build_segmenter("resnet101")
        model.add_classes(21)
        places = {}
        for conv in (m for m in model.modules() if isinstance(m, nn.Conv2d)):
            conv.register_forward_hook(lambda m, _, out: places.__setitem__(m, out[0, 0].numel()))
        model(torch.empty(2, 3, 512, 512))
    by_hand = sum(2 * conv.weight.numel() * count for conv, count in places.items())
    assert counted[0] == by_hand
    assert counted[1] == sum(p.numel() for p in model.parameters())


def test_images_of_the_published_recipe():
    assert gpu_plan.image_passes() == (30 * 8437, 30 * (378 + 299 + 420 + 500 + 548))


@pytest.mark.slow
def test_the_document_quotes_the_plan(capsys):
    assert gpu_plan.main([]) == 0
    document = DOCUMENT.read_text(encoding="utf-8")
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 5 + 7
    assert "\n".join(table[:5]) in document and "\n".join(table[5:]) in document


def test_faster_gpus_take_less(capsys, monkeypatch):
    monkeypatch.setattr(gpu_plan, "memory_plan", lambda *_: "")
    hours = []
    for speed in ("60", "120"):
        gpu_plan.main(["--teraflops", speed])
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| 1 |"))
        hours.append(float(line.split("|")[3]))
    assert hours[1] < hours[0]


@pytest.mark.parametrize(
    ("usable", "gpus", "expected"),
    [
        (25, 1, "1 (24 at once)"),
        (24.9, 1, "2 (12 at once)"),
        (13.4, 1, "3 (8 at once)"),  # from here on with gradients
        (5.5, 1, "6 (4 at once)"),
        (5.5, 2, "3 (4 at once)"),
        (5.5, 8, "1 (3 at once)"),
        (3, 1, "does not fit"),  # one image would, but the norm after the pooling needs two
        (3, 2, "12 (1 at once)"),
        (2, 8, "does not fit"),
    ],
)
def test_the_smallest_accumulate_that_fits(usable, gpus, expected):
    assert gpu_plan.fitting(usable, gpus, fixed=1, per_image=1, gradients=0.5) == expected


def test_counted_bytes_are_those_alive_at_the_fullest_moment():
    tally = Tally()
    with tally, torch.device("meta"):
        a = torch.empty(100)  # 400 bytes
        b = a * 2 + 1  # two more, of which one is given back
        view = b.view(10, 10)
        del a, b
        view.add_(1)
    assert (tally.operators, tally.live, tally.peak) == (4, 400, 1200)


def test_an_iteration_takes_what_its_parts_take():
    """Weights of student and teacher and momentum, beside what grows with the batch by the image."""
    small, medium, large = (count_iteration("resnet_tiny", 64, batch) for batch in (16, 32, 48))
    assert small.operators == large.operators > 100
    assert large.kept - medium.kept == medium.kept - small.kept > 0
    per_image = (large.peak - medium.peak) / 16
    assert per_image == pytest.approx((medium.peak - small.peak) / 16, rel=0.01)
    with torch.device("meta"):
        model = build_segmenter("resnet_tiny")
        model.add_classes(17)
    weights = 4 * sum(p.numel() for p in model.parameters())
    assert 2.9 * weights < small.peak - 16 * per_image < 4.5 * weights


def test_kept_bytes_are_those_of_the_benchmark():
    model = network("resnet_tiny", "abn")
    images = torch.zeros(2, 3, 64, 64)
    of_network = saved_bytes(model, images) - images.nbytes  # the first convolution keeps its input
    assert count_iteration("resnet_tiny", 64, 2).kept == pytest.approx(of_network, rel=0.02)
