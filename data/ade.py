"""ADE20K as in the scene parsing challenge of 2016: 150 classes.

The masks have no background class: 0 means "none of the 150". As in MiB it is trained as the background, so
that old and future classes have something to shift into, and ignored by evaluation (`void_labels`), so that
the background has no share in any metric.
"""

from __future__ import annotations

from pathlib import Path

from data.dataset import IMAGE_SUFFIXES, MASK_SUFFIXES, Dataset, Sample, find_base, one_train_list, register

PLACES = ("", "ADEChallengeData2016")
NEEDED = ("images/training", "images/validation", "annotations/training", "annotations/validation")

# the first synonym of each, in the order of the mask values 1..150
CLASS_NAMES = (
    "background",
    *("wall", "building", "sky", "floor", "tree", "ceiling", "road", "bed", "windowpane", "grass"),
    *("cabinet", "sidewalk", "person", "earth", "door", "table", "mountain", "plant", "curtain", "chair"),
    *("car", "water", "painting", "sofa", "shelf", "house", "sea", "mirror", "rug", "field"),
    *("armchair", "seat", "fence", "desk", "rock", "wardrobe", "lamp", "bathtub", "railing", "cushion"),
    *("base", "box", "column", "signboard", "chest of drawers", "counter", "sand", "sink", "skyscraper"),
    *("fireplace", "refrigerator", "grandstand", "path", "stairs", "runway", "case", "pool table", "pillow"),
    *("screen door", "stairway", "river", "bridge", "bookcase", "blind", "coffee table", "toilet", "flower"),
    *("book", "hill", "bench", "countertop", "stove", "palm", "kitchen island", "computer", "swivel chair"),
    *("boat", "bar", "arcade machine", "hovel", "bus", "towel", "light", "truck", "tower", "chandelier"),
    *("awning", "streetlight", "booth", "television receiver", "airplane", "dirt track", "apparel", "pole"),
    *("land", "bannister", "escalator", "ottoman", "bottle", "buffet", "poster", "stage", "van", "ship"),
    *("fountain", "conveyer belt", "canopy", "washer", "plaything", "swimming pool", "stool", "barrel"),
    *("basket", "waterfall", "tent", "bag", "minibike", "cradle", "oven", "ball", "food", "step", "tank"),
    *("trade name", "microwave", "pot", "animal", "bicycle", "lake", "dishwasher", "screen", "blanket"),
    *("sculpture", "hood", "sconce", "vase", "traffic light", "tray", "ashcan", "fan", "pier", "crt screen"),
    *("plate", "monitor", "bulletin board", "shower", "radiator", "glass", "clock", "flag"),
)


@register("ade", conflicts=one_train_list)
def load_ade(root: str | Path | None, train_list: str = "auto") -> Dataset:
    base = find_base(root, PLACES, NEEDED, "ADE20K (ADEChallengeData2016)")
    train, train_problems = _pairs(base, "training")
    test, test_problems = _pairs(base, "validation")
    problems = {"train": train_problems, "val": test_problems}
    return Dataset("ade", CLASS_NAMES, train, test, problems=problems, void_labels=frozenset({0}))


def _pairs(base: Path, split: str) -> tuple[list[Sample], list[str]]:
    """Return every image with its mask, in ascending order (there are no list files),
    and what has no partner.
    """
    images, masks = (
        {path.stem: path for path in (base / kind / split).iterdir() if path.suffix in suffixes}
        for kind, suffixes in (("images", IMAGE_SUFFIXES), ("annotations", MASK_SUFFIXES))
    )
    problems = [
        f"{images[name]}: has no mask in annotations/{split}; add it"
        for name in sorted(images.keys() - masks)
    ]
    problems += [
        f"{masks[name]}: has no image in images/{split}; add it" for name in sorted(masks.keys() - images)
    ]
    if not images:
        problems.append(f"{base / 'images' / split}: holds no images; unpack the data set again")
    return [Sample(name, images[name], masks[name]) for name in sorted(images.keys() & masks)], problems
