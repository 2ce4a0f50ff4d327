"""Turn a step checkpoint of MiB, PLOP or their relatives, of DKD or of STAR into one that runs here can start
from or score.

python -m scripts.import_mib 15-5s-voc_MiB_0.pth step_0.pt configs/voc/15-1.yaml
python train.py configs/voc/15-1.yaml configs/methods/mib.yaml data.root=/data/voc train.start_from=step_0.pt

Files of DKD and STAR need model.body=resnet101_relu model.head=aspp and the overlay of their method. Overlays
and overrides say which network and protocol the file is of, --norm-act with which norms a file of the MiB
family was trained; the file itself says neither. Nothing in it is executed.
"""

import argparse
import sys
from pathlib import Path

from configs.schema import ConfigError, dump_config
from data import ade, voc
from data.protocols import configured_steps
from engine import checkpoint
from engine.arguments import read_config
from engine.terminal import command
from models.pretrained import WeightsError, import_mib_checkpoint, sha256_of
from models.segmenter import build_segmenter
from models.sigmoid_steps import import_sigmoid_step, is_sigmoid_step

CLASS_NAMES = {"voc": voc.CLASS_NAMES, "ade": ade.CLASS_NAMES}


@command
def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="the checkpoint")
    parser.add_argument("target", type=Path, help="the step checkpoint to write (step_<i>.pt)")
    parser.add_argument(
        "config", nargs="+", help="YAML overlays and key.sub=value overrides, as for train.py"
    )
    parser.add_argument(
        "--norm-act",
        choices=("iabn_sync", "iabn", "abn"),
        default="iabn_sync",
        help="MiB's --norm_act: abn scales by the signed weight, the others by |weight| + eps (iabn_sync, "
        "MiB's default)",
    )
    options = parser.parse_args(arguments)
    print(convert(options.source, options.target, options.config, signed_norms=options.norm_act == "abn"))
    return 0


def convert(source: Path, target: Path, config_arguments: list[str], *, signed_norms: bool = False) -> str:
    config = read_config(config_arguments)
    if config.data.dataset not in CLASS_NAMES or config.data.protocol is None:
        raise ConfigError(
            ["data.protocol: checkpoints of the MiB family are of the protocols of voc and ade"]
        )
    foreground = is_sigmoid_step(source)
    if (
        not foreground
        and config.model.output_stride == 8
        and None in (config.model.dilations, config.model.pooling)
    ):
        raise ConfigError(
            [
                "model.output_stride: at 8, MiB's head has other dilations and another pooling window than "
                "ours, and its file does not say so; add model.dilations=[12,24,32] model.pooling=32, here "
                "and for train.py"
            ]
        )
    data, class_names = config.data, CLASS_NAMES[config.data.dataset]
    steps = configured_steps(data.dataset, data.protocol, None, class_names, data.order)
    model = build_segmenter(**config.model.architecture)
    new = [step.num_new for step in steps]
    if foreground:
        report = import_sigmoid_step(source, model, new)
    else:
        report = import_mib_checkpoint(source, model, signed_norms=signed_norms)
    sizes = [classifier.out_channels for classifier in model.classifiers]
    expected = [new[0] + (not foreground), *new[1:]][: len(sizes)]
    if sizes != expected:
        raise WeightsError(
            f"{source}: its classifiers have {sizes} classes, those of {config.data.protocol} have "
            f"{expected}: give the protocol of the checkpoint"
        )
    step = steps[len(sizes) - 1]
    state = checkpoint.step_state(
        model,
        config.model.architecture,
        step=step.index,
        class_ids=step.seen,
        class_names=CLASS_NAMES[config.data.dataset],
        methods={},
        costs={},
        config=dump_config(config),
        trained={"imported": {"file": source.name, "sha256": sha256_of(source)}},
        num_new=step.num_classes if step.index == 0 else step.num_new,
        rule=report.format.lower() if foreground else None,  # the method of DKD or STAR
    )
    checkpoint.save(state, target)
    written = f"step {step.index} of {config.data.protocol} written to {target}"
    return f"{report}\n{written}: start with train.start_from={target}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
