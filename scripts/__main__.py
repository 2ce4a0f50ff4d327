"""Every command of the project in one line each: `python -m scripts`."""

from engine.terminal import exit_with

COMMANDS = {
    "check_data": "is a data set complete? images, classes and the sizes of the steps",
    "merge_sbd": "VOC 2012 + SBD -> the masks and the list that published results use",
    "convert_masks": "colour masks -> masks of class numbers, which training reads",
    "pack_data": "a data set -> one file, which data.root takes like the folder",
    "shrink_data": "VOC -> the small VOC of the CPU recipe",
    "import_mib": "a checkpoint of MiB, PLOP, DKD, STAR or their relatives -> one to start from",
    "reproduce": "run what the paper's tables and figures consist of",
    "status": "how far every run below some folders is",
    "compare": "one table and one figure over several runs",
    "report": "the paper's tables and figures from finished runs",
    "predict": "what a trained network sees in images of your own",
    "export": "a step -> safetensors and a model card, which other places take",
    "flatness": "how flat the loss is at a model of a run",
    "gpu_plan": "what the paper's table 1 should cost on GPUs, by counted operations",
    "benchmark": "measure what the project says about its speed and memory",
}
FOR_MAINTAINERS = {
    "dev.crash_test": "kill real runs at random moments and compare how they end",
    "dev.protocol_picture": "draw the figure of docs/protocols.md",
    "dev.slurm_session": "disturb runs on a real Slurm and compare how they end",
    "dev.theorem": "measure and draw Theorem 1 of AlterSGD",
}


def main(arguments: list[str]) -> int:
    """Print the list, whatever the arguments."""
    print("python -m scripts.<command> --help says more. To train: python train.py --help\n")
    print(listed(COMMANDS))
    print("\nfor maintainers:")
    print(listed(FOR_MAINTAINERS))
    return 0


def listed(commands: dict[str, str]) -> str:
    """Return a line per command, with its name in a column."""
    return "\n".join(f"  {name:<20} {what}" for name, what in commands.items())


if __name__ == "__main__":
    exit_with(main)
