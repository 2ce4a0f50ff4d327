"""A toy segmenter in float64, small enough for slow references and smooth enough for derivatives."""

from __future__ import annotations

import torch
from conftest import TINY_NETWORK
from torch import Tensor, nn

from data.protocols import Step
from methods import Batch, make_method
from models import Output
from models.segmenter import build_segmenter

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


def student_and_teacher(name: str, losses: str = "plain", seed: int = 0):
    """A method in step 1, the two networks it then has, in eval so that they can be compared, and a batch."""
    torch.manual_seed(seed)
    method, student = make_method(name, losses=losses), build_segmenter(**TINY_NETWORK)
    method.protocol = STEPS
    method.add_classifier(student, STEPS[0])
    method.begin_step(student, STEPS[0])
    method.review(_outputs(method, student, STEPS[0]))
    method.end_step(student)
    teacher = student.frozen_copy()
    method.add_classifier(student, STEPS[1])
    method.init_classifier(student)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    method.freeze(student)
    for network in (student, teacher):
        method.attach(network, STEPS[1])
    method.begin_step(student, STEPS[1])
    method.survey(_outputs(method, teacher, STEPS[1]))
    images, labels = _images(STEPS[1], 3)
    return method, student.eval(), teacher, Batch(images, labels)


def _images(step: Step, seed: int) -> tuple[Tensor, Tensor]:
    """Images with the labels of a step: background and its new classes."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(2, 3, 32, 32, generator=generator)
    labels = torch.randint(step.num_new + 1, (2, 32, 32), generator=generator)
    return images, torch.where(labels > 0, labels + step.num_old - 1, 0)


def _outputs(method, network, step):
    """What `survey` and `review` are given."""
    method.attach(network, step)
    with torch.no_grad():
        for seed in range(2):
            images, labels = _images(step, seed)
            yield labels, network.eval()(images)
