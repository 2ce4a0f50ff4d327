"""scripts.gpu_plan: counted on paper as well, and the documents quote it."""

from pathlib import Path

import torch
from torch import nn

from models.segmenter import build_segmenter
from scripts import gpu_plan

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


def test_pictures_of_the_published_recipe():
    assert gpu_plan.picture_passes() == (30 * 8437, 30 * (378 + 299 + 420 + 500 + 548))


def test_the_document_quotes_the_plan(capsys):
    assert gpu_plan.main([]) == 0
    document = DOCUMENT.read_text(encoding="utf-8")
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 5 and "\n".join(table) in document


def test_faster_gpus_take_less(capsys):
    hours = []
    for speed in ("60", "120"):
        gpu_plan.main(["--teraflops", speed])
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| 1 |"))
        hours.append(float(line.split("|")[3]))
    assert hours[1] < hours[0]
