"""What the paper prints (Huang et al. 2021, arXiv 2107.05804), as data.

mIoU in percent on the VOC 2012 validation set, 15-1 disjoint, ResNet-101. "1-15", "16-20" and "all" are means
over foreground classes.
"""

from fractions import Fraction
from typing import Any

SETTING: dict[str, dict[str, Any]] = {
    "data": {"dataset": "voc", "protocol": "15-1", "mode": "disjoint"},
    "model": {"body": "resnet101"},
    "optim": {"lr": 0.01, "lr_later": 0.001},
    "train": {"epochs": 30, "epochs_later": 30},
}
SETTING_IN_WORDS = "VOC, ResNet-101"

# fmt: off
CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog", "horse",
    "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)
GROUPS = ("1-15", "16-20", "all")
NUM_OLD = 15

# Tables 1 and 2: IoU of each class, in the order of CLASSES.
PER_CLASS = {
    "FT":       (0.3, 0.0, 0.0, 2.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 8.8),
    "PI":       (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.3, 8.6),
    "EWC":      (0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 3.6, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 7.3, 7.0, 7.4),
    "RW":       (0.0, 0.0, 0.0, 0.2, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.2, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 8.1, 10.5, 8.2),
    "LwF":      (0.0, 0.0, 0.0, 0.0, 0.6, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.9, 8.2, 7.9),
    "LwF-MC":   (0.0, 6.3, 0.8, 0.0, 1.1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.9, 11.9, 11.0),
    "ILT":      (3.7, 0.0, 2.9, 0.0, 12.8, 0.0, 0.0, 0.1, 0.0, 0.0, 21.2, 0.1, 0.4, 0.6, 13.6, 0.0, 0.0, 11.6, 8.3, 8.5),
    "MiB":      (53.8, 38.7, 35.5, 25.9, 45.3, 14.2, 71.5, 71.5, 0.3, 22.6, 12.6, 62.6, 52.3, 48.8, 79.8,
                 10.9, 13.3, 10.7, 18.1, 10.1),
    "AlterSGD": (64.6, 39.4, 44.5, 39.1, 56.4, 57.4, 78.5, 74.5, 2.4, 51.7, 14.2, 66.2, 60.2, 62.5, 78.6,
                 8.4, 13.6, 8.8, 22.9, 10.7),
    "Joint":    (90.2, 42.2, 89.5, 69.1, 82.3, 92.5, 90.0, 94.2, 39.2, 87.6, 56.4, 91.2, 86.8, 88.0, 86.8,
                 62.3, 88.4, 49.5, 85.0, 78.0),
}
# Tables 1 and 2: the printed means of GROUPS.
MEANS = {
    "FT": (0.2, 1.8, 0.6), "PI": (0.0, 1.8, 0.4), "EWC": (0.3, 4.3, 1.3), "RW": (0.2, 5.4, 1.5), "LwF": (0.8, 3.6, 1.5),
    "LwF-MC": (4.5, 7.0, 5.2), "ILT": (3.7, 5.7, 4.2), "MiB": (42.4, 12.6, 34.9), "AlterSGD": (52.7, 12.9, 42.7),
    "Joint": (79.1, 72.6, 77.4),
}
CONTRADICTORY = ("LwF", "LwF-MC")  # their printed means do not follow from their printed classes

# Table 3: lambda -> the means of GROUPS.
TABLE_3: dict[float, dict[str, tuple[float, ...]]] = {
    1:    {"MiB": (30.9, 11.4, 26.1), "AlterSGD": (36.1, 11.8, 30.0)},
    10:   {"MiB": (36.3, 13.9, 30.7), "AlterSGD": (48.9, 13.7, 40.1)},
    100:  {"MiB": (42.4, 12.6, 34.9), "AlterSGD": (52.7, 12.9, 42.7)},
    1000: {"MiB": (16.8, 5.6, 13.9), "AlterSGD": (19.5, 5.6, 16.0)},
}
LAMBDAS = tuple(TABLE_3)

# Table 4: group -> lambda_b (of ascents) -> one number for each lambda_a (of descents) in LAMBDAS.
TABLE_4: dict[str, dict[float, tuple[float, ...]]] = {
    "1-15": {
        1: (36.1, 45.2, 55.1, 18.4), 10: (46.7, 48.9, 55.0, 17.7),
        100: (46.2, 53.2, 52.7, 17.2), 1000: (42.3, 51.1, 49.0, 19.5),
    },
    "16-20": {
        1: (11.8, 14.4, 9.5, 3.9), 10: (11.9, 13.7, 9.7, 4.2),
        100: (9.6, 14.8, 12.9, 4.9), 1000: (2.3, 8.5, 13.7, 5.6),
    },
    "all": {
        1: (30.0, 37.5, 43.7, 14.8), 10: (38.0, 40.1, 43.7, 14.4),
        100: (37.1, 43.6, 42.7, 14.1), 1000: (32.3, 40.5, 40.2, 16.0),
    },
}

# The figure over p, as far as the text gives its points: p -> the means of GROUPS. At p = 1 nothing
# alternates: MiB.
ALMOST_ZERO = "≈ 0"
FIGURE_P: dict[Fraction, tuple[float | str | None, ...]] = {
    Fraction(5, 30): (ALMOST_ZERO, ALMOST_ZERO, ALMOST_ZERO),
    Fraction(10, 30): (ALMOST_ZERO, ALMOST_ZERO, ALMOST_ZERO),
    Fraction(15, 30): (14.1, ALMOST_ZERO, None),
    Fraction(20, 30): (None, None, None),
    Fraction(25, 30): MEANS["AlterSGD"],
    Fraction(30, 30): MEANS["MiB"],
}
DEFAULT_P = Fraction(25, 30)
# fmt: on

# What methods of the ladder reached on VOC 15-1 in the papers that print them: mode -> row -> means of old
# classes, new ones and all, and of how many classes "all" is the mean: 20 without the background, 21 with it.
# ResNet-101; None is not printed. The rows of the mode disjoint up to ILT are MiB's, which this paper repeats.
# fmt: off
PUBLISHED: dict[str, dict[str, tuple[tuple[float | None, float | None, float, int], ...]]] = {
    "disjoint": {
        "FT": ((*MEANS["FT"], 20),), "LwF": ((*MEANS["LwF"], 20),), "ILT": ((*MEANS["ILT"], 20),),
        "MiB": ((46.2, 12.9, 37.9, 20), (None, None, 40.7, 21)),
        "AlterSGD": ((*MEANS["AlterSGD"], 20),),
        "PLOP": ((None, None, 46.5, 21),),
        "DKD": ((None, None, 68.5, 21),), "DKD-M": ((None, None, 70.8, 21),),
        "STAR": ((None, None, 70.8, 21),),
    },
    "overlapped": {
        "FT": ((None, None, 0.6, 20),), "LwF": ((None, None, 1.8, 20),), "ILT": ((None, None, 5.7, 20),),
        "MiB": ((35.1, 13.5, 29.7, 20), (None, None, 34.6, 21)),
        "PLOP": ((65.1, 21.1, 54.6, 21),),
        "DKD": ((None, None, 70.5, 21),), "DKD-M": ((None, None, 73.0, 21),),
        "SSUL": ((None, None, 67.6, 21),), "SSUL-M": ((None, None, 71.4, 21),),
        "STAR": ((None, None, 72.9, 21),),
    },
}
# fmt: on

# How the paper may be read and what it leaves open, as keys of `phase` in the config; the first choice is the
# default.
READING = {"flip": ("seg", "all"), "every": ("iteration", "epoch")}
OPEN: dict[str, tuple[Any, ...]] = {
    "momentum": ("keep", "reset", "off"),
    "batch": ("next", "same"),
    "weight_decay": ("always", "signed"),
    "lr": ("decay", "hold"),
    "from_step": (1, 0),
}
CHOICES = READING | OPEN

# Row -> method.name and published lambda; the Joint row is fine-tuning on all classes at once.
METHODS = {
    "FT": ("ft", 0.0),
    "PI": ("pi", 500.0),
    "EWC": ("ewc", 500.0),
    "RW": ("rw", 100.0),
    "LwF": ("lwf", 100.0),
    "LwF-MC": ("lwf_mc", 10.0),
    "ILT": ("ilt", 100.0),
    "MiB": ("mib", 10.0),
}
MIB_STRENGTH_15_1 = 100.0
