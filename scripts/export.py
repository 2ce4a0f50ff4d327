"""Write a step as a folder that travels: safetensors, config.json, metrics and a model card; no pickle.

    python -m scripts.export runs/mib mib-voc-15-1              # the last step of a run
    python -m scripts.export runs/mib mib-voc-15-1 --step 0     # another one
    python -m scripts.export runs/mib/step_0.pt mib-voc-15-1    # a step checkpoint
    python -m scripts.predict mib-voc-15-1 photos --out seen    # and it is taken wherever that one is

train.start_from takes the folder, too. What methods such as EWC keep for the next step is written beside the
weights; --weights-only leaves it out.
"""

import argparse
from pathlib import Path
from typing import Any

from engine import checkpoint
from engine.exported import write_export
from engine.model_card import config_of, model_card
from engine.prediction import find_checkpoints
from engine.results import metrics_by_step
from engine.run_folder import read_results
from engine.terminal import command, exit_with

# of results.json: what metrics depend on, and what a run that starts from them compares
KEPT = ("config", "protocol", "classes", "environment", "data", "weights")


@command
def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("source", type=Path, help="a run's folder (its last step is taken), or one step_<i>.pt")
    add("folder", type=Path, help="the folder to write, which is new")
    add("--step", type=int, metavar="N", help="the network after this step, counted from 0")
    add("--weights-only", action="store_true", help="without the statistics of methods such as EWC")
    add("--license", default="mit", help="of the weights, as hubs name it (default: %(default)s)")
    options = parser.parse_args(arguments)
    (source,) = find_checkpoints(options.source, options.step, all_steps=False)
    export(source, options.folder, with_statistics=not options.weights_only, licence=options.license)
    print(f"{source} written to {options.folder}")
    return 0


def export(source: Path, folder: Path, *, with_statistics: bool = True, licence: str = "mit") -> None:
    """Write a step checkpoint, or another export, with the metrics that stand beside it."""
    state = checkpoint.load(source)
    checkpoint.check_step(source, state)
    checkpoint.load_segmenter(source)  # or nobody could load it
    if not with_statistics:
        state |= {"methods": {}}
    results = metrics_beside(source, state)
    method = config_of(state).get("method", {}).get("name")
    write_export(folder, state, model_card(state, results, licence), method=method, results=results)


def metrics_beside(source: Path, state: dict[str, Any]) -> dict[str, Any] | None:
    """Return the results.json of a run until the step, None if it has no metrics of this very model."""
    results = read_results((source if source.is_dir() else source.parent) / "results.json")
    if not results or not {"config", "data", "protocol", "steps"} <= results.keys():
        return None
    steps = {i: result for i, result in metrics_by_step(results["steps"]).items() if i <= state["step"]}
    last, costs = steps.get(state["step"]), state["costs"]
    if last is None or any(last.get(key) != costs.get(key) for key in ("seconds", "iterations")):
        return None
    return {key: results[key] for key in KEPT if key in results} | {"steps": list(steps.values())}


if __name__ == "__main__":
    exit_with(main)
