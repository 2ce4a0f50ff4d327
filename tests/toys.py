"""A toy segmenter in float64, small enough for slow references and smooth enough for derivatives."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from data.protocols import Step
from models import Output

STEPS = (Step(0, (), (1, 2)), Step(1, (1, 2), (3,)), Step(2, (1, 2, 3), (4, 5)))


class ToySegmenter(nn.Module):
    """Per pixel: 2 inputs -> 3 tanh features -> one linear classifier per step."""

    def __init__(self, *num_classes: int) -> None:
        super().__init__()
        self.body = nn.Conv2d(2, 3, 1, dtype=torch.float64)
        self.classifiers = nn.ModuleList()
        for num in num_classes:
            self.add_classes(num)

    @property
    def num_classes(self) -> int:
        return sum(classifier.out_channels for classifier in self.classifiers)

    def add_classes(self, num: int) -> None:
        self.classifiers.append(nn.Conv2d(3, num, 1, dtype=torch.float64))

    def forward(self, images: Tensor) -> Output:
        features = self.body(images).tanh()
        return Output(torch.cat([classifier(features) for classifier in self.classifiers], dim=1), features)


def toy_batch(seed: int, num_classes: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(2, 2, 4, 4, dtype=torch.float64, generator=generator)
    return images, torch.randint(num_classes, (2, 4, 4), generator=generator)


def weighted_loss(method, weights, model, images, labels, teacher=None) -> Tensor:
    """learn * l_seg + keep * R, as the training loop forms it."""
    student = model(images)
    with torch.no_grad():
        kept = None if teacher is None else teacher(images)
    terms = method.retention_losses(student, kept)
    return weights.learn * method.segmentation_loss(student.logits, labels) + weights.keep * sum(
        terms.values()
    )
