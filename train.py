"""Continual semantic segmentation: learn the classes of a protocol step by step,
and measure what is forgotten.

    python train.py configs/quickstart.yaml configs/methods/mib.yaml configs/altersgd.yaml data.root=shapes
    torchrun --nproc_per_node=2 train.py configs/voc/15-1.yaml configs/methods/mib.yaml data.root=/data/voc

Arguments are YAML overlays, merged left to right over configs/base.yaml, and key.sub=value overrides, which
always win. The same command, typed again, resumes where the run stopped. All steps run unless
train.first_step / train.last_step say otherwise; train.start_from=<step_i.pt> begins after a step trained
elsewhere; train.evaluate_only=true only scores.

Exit codes: 0 finished, 2 bad config, data or weights, 75 stopped by a signal with everything saved, 1
anything else.
"""

import sys

from configs.errors import UserError
from configs.schema import Config
from engine.arguments import help_text, read_config
from engine.evaluation import catch_up, evaluate, record, score_again
from engine.heartbeat import lost_connection
from engine.ranks import Ranks, StoppedBySignal, StopRequest, start_ranks, stop_ranks
from engine.results import metrics_by_step, steps_done
from engine.run import prepare
from engine.step import load_step, train_step
from engine.terminal import STOPPED_BY_SIGNAL, command, exit_with
from metrics.continual import group_names
from tracking.tables import class_table, step_table

DEAD_WORKER = (
    "A process that loads images died, most often for lack of memory: lower data.workers or data.crop. "
    "The same command resumes from the last checkpoint."
)


@command
def main(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(help_text(str(__doc__)))
        return 0
    config = read_config(arguments)
    ranks = start_ranks(config.train.device)
    try:
        walk(config, ranks, StopRequest(ranks.store))
        return 0
    except StoppedBySignal as stopped:
        print(f"[rank {ranks.rank}] {stopped}" if ranks.world > 1 else stopped, file=sys.stderr)
        return STOPPED_BY_SIGNAL
    except RuntimeError as error:
        remedy = DEAD_WORKER if "DataLoader worker" in str(error) else lost_connection(error)
        if isinstance(error, UserError) or remedy is None:
            raise
        print(f"error: {error}\n{remedy}", file=sys.stderr)
        return 1
    finally:
        stop_ranks()


def walk(config: Config, ranks: Ranks, stop: StopRequest) -> dict:
    """Train what is missing of the protocol's steps, score what has no score, and return the results."""
    run = prepare(config, ranks, stop)
    catch_up(run)
    if config.train.evaluate_only:
        score_again(run)
    was_finished = not config.train.evaluate_only
    for step in run.steps[run.first : run.last_step + 1] if was_finished else ():
        saved = run.folder.step_checkpoint(step.index).exists()
        if saved and step.index in metrics_by_step(run.scores):
            continue
        was_finished = False
        if saved:
            model, state = load_step(run, step)
            run.board.open()  # scoring must not discard the curves of later steps
        elif step.index >= config.train.first_step:
            model, state = train_step(run, step)
        else:
            raise run.folder.lacks(step.index)
        record(run, step, evaluate(run, step, model), state["costs"])
    if run.scores:
        title = (
            "" if run.evaluation is None else f"scored as {run.evaluation}, beside the run's own scores\n\n"
        )
        run.say(f"\n{title}{class_table(run.scores)}\n\n{step_table(run.scores, group_names(run.steps))}")
        watch = run.board.watch(config.run.folder)
        run.say(f"\nresults: {run.folder.results_file}" + (f"\nwatch:   {watch}" if watch else ""))
    if was_finished:
        run.say("Every step asked for was finished already: nothing was trained.")
    if run.evaluation is None and steps_done(run.scores) == len(run.steps):
        run.board.finish(run.results["config"])
    run.board.close()
    run.folder.unlock()
    return run.results


if __name__ == "__main__":
    exit_with(main)
