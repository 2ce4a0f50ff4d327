"""A data set -> one file, which data.root takes in place of the folder: same batches, same class index,
same digests.

    python -m scripts.pack_data /data/VOC2012 /data/voc.pack               # decoded: training decodes nothing
    python -m scripts.pack_data /data/VOC2012 /data/voc.pack --bytes original      # as small as the folder
    python train.py configs/voc/15-1.yaml data.root=/data/voc.pack

On a cluster's network disk one open file takes the place of tens of thousands. Decoded, VOC is about six
times as large as its files. A run that was begun on the folder resumes on the file, and the other way round.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data import DATASETS, DataError, Sample, find_lists
from data.dataset import raise_problems
from data.images import read_bytes, read_image, read_mask
from data.index import Finding, scan
from data.packs import write_pack
from engine.terminal import command, exit_with
from scripts.check_data import recognise


@command
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.pack_data",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("root", type=Path, help="folder of the data set, as in data.root")
    parser.add_argument(
        "out", type=Path, help="file to write; one that is there is replaced when the new one is whole"
    )
    parser.add_argument("--dataset", choices=DATASETS, help="what it is (default: what it looks like)")
    parser.add_argument(
        "--bytes",
        choices=("original", "decoded"),
        default="decoded",
        help="what to keep of each file: its own bytes, or its pixels (default)",
    )
    options = parser.parse_args(arguments)
    print(
        pack(options.root.expanduser(), options.out.expanduser(), options.dataset, options.bytes == "decoded")
    )
    return 0


def pack(root: Path, out: Path, name: str | None, decoded: bool) -> str:
    """Write the file; returns what to tell the user."""
    if root.is_file():
        raise DataError(f"{root} is a file; give the folder of the data set")
    if out.is_dir():
        raise DataError(f"{out} is a folder; name the file to write")
    dataset = recognise(root, name)
    lists = find_lists(dataset, root)
    raise_problems(
        f"the lists of {dataset.name} cannot be used", [line for _, group in lists.values() for line in group]
    )
    # keyed by files and not by names: train_aug and train share images, a name may stand for others in val
    samples = list(dict.fromkeys(sample for group, _ in lists.values() for sample in group))
    findings = scan(
        dataset.name, samples, dataset.num_classes, unnamed="void"
    )  # named or not is the config's matter
    raise_problems(
        f"files of {dataset.name} cannot be used",
        [finding.problem for finding in findings if finding.problem],
    )
    place = {sample: 2 * number for number, sample in enumerate(samples)}
    lines = {
        key: [(sample.name, place[sample], place[sample] + 1) for sample in group]
        for key, (group, _) in lists.items()
    }
    try:
        size = write_pack(out, dataset, lines, files(root, samples, findings, decoded))
    except OSError as error:
        raise DataError(f"{out}: cannot be written ({error}); make room or name another place") from error
    shown = ", ".join(f"{key} {len(group):,}" for key, group in lines.items())
    content = f"{dataset.name}, {shown}; {size / 2**30:.2f} GiB"
    return f"{out}: {content}. Train with data.dataset={dataset.name} data.root={out}"


def files(
    root: Path, samples: Sequence[Sample], findings: Sequence[Finding], decoded: bool
) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Image and mask of each image in turn: what the index tells of them, and the record."""
    for sample, finding in zip(tqdm(samples, desc="packing", disable=None), findings, strict=True):
        parts = ((sample.image, read_image, finding.how), (sample.mask, read_mask, ()))
        for (path, read, how), digest in zip(parts, finding.content.split(), strict=True):
            facts = {
                "path": os.path.relpath(path, root),
                "file_size": os.path.getsize(path),
                "content": digest,
            }
            if decoded:
                pixels = read(path)
                yield {**facts, "shape": pixels.shape, "how": how}, pixels.tobytes()
            else:
                yield facts, read_bytes(path)


if __name__ == "__main__":
    exit_with(main)
