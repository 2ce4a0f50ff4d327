"""scripts.reproduce and its launchers: nothing is trained twice, and no fault of one run reaches another."""

import json
import os
import re
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

import train
from configs.schema import Config, dump_config
from engine.run_folder import read_results
from scripts import reproduce
from scripts.dev.crash_test import process_tree
from study import experiments, launchers
from study.experiments import TABLES, Job, mib
from study.launchers import Event, Task, run_here, train_command
from study.plan import PRESETS, list_jobs
from study.slurm import Training, run_on_cluster

ROOT = Path(train.__file__).parent
FEW = ("ft", "lwf_mc", "mib", "mib-altersgd", "joint")
NAMES = [f"{name}_seed1" for name in ("step0", *FEW)]

pytestmark = pytest.mark.usefixtures("at_the_root")

# Stands in for train.py: writes what a run leaves, fails, hangs until it is told to stop, or dies, as
# `behave/<name>` says.
FAKE = """
import json, os, pathlib, shutil, signal, sys, time
here = pathlib.Path(__file__).parent
settings = dict(argument.split("=", 1) for argument in sys.argv[1:] if "=" in argument)
name = settings["run.name"]
folder = pathlib.Path(settings["run.folder"]) / name
with open(here / "calls", "a") as calls:
    calls.write(name + "\\n")
print("threads", os.environ.get("OMP_NUM_THREADS"))
print("own session", os.getsid(0) == os.getpid(), flush=True)
if "train.start_from" in settings and not pathlib.Path(settings["train.start_from"]).exists():
    sys.exit("step 0 is not there")
folder.mkdir(parents=True, exist_ok=True)
shutil.copy(here / "configs" / f"{name}.yaml", folder / "config.yaml")
behaviour = here / "behave" / name
behaviour = behaviour.read_text() if behaviour.exists() else ""
if behaviour == "fail":
    print("10%\\r100%", "the last words", sep="\\n")
    sys.exit(3)
if behaviour == "die":
    os.kill(os.getpid(), signal.SIGKILL)
resume = folder / "resume.pt"
if resume.exists():
    print("going on")
elif behaviour == "hang":
    def save(number, frame):
        resume.touch()
        print("saved after signal", number)
        sys.exit(75)
    signal.signal(signal.SIGTERM, save)
    signal.signal(signal.SIGINT, save)
    (here / "hanging").touch()
    time.sleep(60)
    sys.exit("nobody came")
resume.unlink(missing_ok=True)
steps = 1 if "train.last_step" in settings or name.startswith("joint") else 2
costs = {"seconds": 3.0, "images": 4, "iterations": 6, "miou": {"old": 0.5, "new": 0.25, "all": 0.375}}
results = {"protocol": [[1, 2], [3]], "config": {"train": {"batch_size": 5}}, "steps": [costs] * steps}
(folder / "step_0.pt").touch()
(folder / "results.json").write_text(json.dumps(results))
"""


class Study:
    """A folder of runs on toy data, and train.py or what stands in for it."""

    def __init__(self, folder: Path, root: Path, *overrides: str):
        self.folder, self.root, self.runs = folder, root, folder / "runs"
        self.overrides = ["data.steps=[[1, 2], [3]]", f"data.cache={folder}/cache", *overrides]
        self.fake = folder / "fake_train.py"
        self.fake.write_text(FAKE)
        for place in ("configs", "behave"):
            (folder / place).mkdir()

    def arguments(self, table: str, *more: str) -> list[str]:
        given = ["--preset", "shapes", "--root", str(self.root), "--runs", str(self.runs), "--seeds", "1"]
        return [table, *given, *more, *self.overrides]

    def jobs(self, table: str, *more: str) -> dict[Job, Config]:
        options, settings = reproduce.parse(self.arguments(table, *more)), {"data.root": self.root}
        return list_jobs([table], PRESETS["shapes"], options.seeds, self.runs, settings, options.overrides)

    def start(self, table: str, *more: str, real: bool = False) -> int:
        for job, config in self.jobs(table, *more).items():
            (self.folder / "configs" / f"{job.name}.yaml").write_text(dump_config(config))
        command = None if real else [sys.executable, "-S", str(self.fake)]
        return reproduce.main(self.arguments(table, *more), command)

    def behave(self, name: str, how: str) -> None:
        (self.folder / "behave" / name).write_text(how)

    @property
    def calls(self) -> list[str]:
        file = self.folder / "calls"
        return file.read_text().split() if file.exists() else []

    def forget_calls(self) -> None:
        (self.folder / "calls").unlink()

    def log(self, name: str) -> str:
        return (self.runs / f"{name}.log").read_text()


@pytest.fixture
def study(tmp_path, toy_voc, monkeypatch) -> Study:
    """Its table1 has five rows only: two that share no step 0 and three that do."""
    whole = TABLES["table1"]
    monkeypatch.setitem(TABLES, "table1", lambda data: [e for e in whole(data) if e.name in FEW])
    monkeypatch.setattr(launchers, "POLL_SECONDS", 0.01)
    return Study(tmp_path, toy_voc)


# ---- running: train.py replaced ----------------------------------------------------------------------------


@pytest.mark.slow
def test_all_that_is_missing_runs_once_and_what_is_done_never_again(study, capsys):
    assert study.start("table1") == 0
    shown = capsys.readouterr().out
    assert study.calls == NAMES
    assert f"[0/6] step0_seed1: started, log {study.runs}/step0_seed1.log" in shown
    assert "[6/6] joint_seed1: done after 0:00:00, 1-2 50.0 / 3 25.0 / all 37.5" in shown
    assert shown.endswith("\n6 runs: 6 done\n")

    study.forget_calls()
    assert study.start("table1") == 0
    shown = capsys.readouterr().out
    assert study.calls == [] and "6 runs: 6 done" in shown and "started" not in shown
    assert "0.0 hours" in shown and "100.0 ms per image (measured here)" in shown

    assert study.start("figure-p") == 0  # shares mib and mib-altersgd
    assert study.calls == [f"mib-altersgd_p={p}-30_seed1" for p in (5, 10, 15, 20)]


def test_an_interrupted_run_goes_on_and_the_rest_follows(study, capsys):
    study.behave("lwf_mc_seed1", "hang")
    assert start_and_signal(study, signal.SIGTERM) == 75
    shown = capsys.readouterr().out
    assert "lwf_mc_seed1: stopped after" in shown and "6 runs: 2 done, 1 stopped, 3 not started" in shown
    assert study.calls == NAMES[:3] and "saved after signal 15" in study.log("lwf_mc_seed1")

    assert study.start("table1", "--dry-run") == 0
    rows = dict(line.split()[:2] for line in capsys.readouterr().out.splitlines() if "_seed1" in line)
    assert list(rows.values()) == ["done", "done", "resumable", "missing", "missing", "missing"]

    study.forget_calls()
    assert study.start("table1") == 0
    assert study.calls == NAMES[2:]
    log = study.log("lwf_mc_seed1")  # appended
    assert log.index("saved after signal") < log.index("going on")


def test_what_waits_for_a_stopped_run_is_not_skipped_but_left_for_the_next_start(tmp_path, monkeypatch):
    """One that saves at once and one that takes its time: what waits for the first has seen no fault."""
    monkeypatch.setattr(launchers, "POLL_SECONDS", 0.01)
    save = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep({}), sys.exit(75)))"
    )
    wait = "; open({!r}, 'w').close(); time.sleep(60)"

    def task(name: str, seconds: float = 0.0, needs: str | None = None) -> Task:
        code = save.format(seconds) + wait.format(str(tmp_path / f"{name}.ready"))
        return Task(name, (sys.executable, "-S", "-c", code), tmp_path / f"{name}.log", needs)

    stop, ended = Stop(), {}
    for one, event in run_here([task("quick"), task("slow", 0.5), task("later", needs="quick")], stop, 2):
        ended[one.name] = event
        if len(ended) == 2:
            while len(list(tmp_path.glob("*.ready"))) < 2:
                time.sleep(0.01)
            stop.requested = True
    assert ended == {"quick": Event.STOPPED, "slow": Event.STOPPED}


def test_some_rows_alone_in_their_own_order(study, capsys):
    assert study.start("table1", "--only", "joint", "mib*") == 0
    assert study.calls == [f"{name}_seed1" for name in ("step0", "joint", "mib", "mib-altersgd")]
    study.forget_calls()
    assert study.start("table1", "--only", "joint_seed1", "lwf_mc_seed?") == 0
    assert study.calls == ["lwf_mc_seed1"]  # joint is done, and neither needs a step 0
    capsys.readouterr()
    assert study.start("table1", "--only", "joint", "jiont") == 2
    message = capsys.readouterr().err
    assert (
        "--only jiont: no run has this name; choose of step0, ft, lwf_mc, mib, mib-altersgd, joint" in message
    )


def test_metrics_that_came_without_their_run_count_if_whole_and_made_as_planned(study, capsys):
    """As they stand in results/ or come from another machine: results.json, which holds the config, and
    nothing else."""
    configs = {job.name: json.loads(config.model_dump_json()) for job, config in study.jobs("table1").items()}
    step = {"seconds": 3.0, "iterations": 6}

    def bring(name: str, steps: int, changed: dict | None = None) -> None:
        (study.runs / name).mkdir(parents=True)
        config = configs[name] | (changed or {})
        (study.runs / name / "results.json").write_text(
            json.dumps({"config": config, "steps": [step] * steps})
        )

    bring("ft_seed1", steps=2)
    bring("lwf_mc_seed1", steps=1)  # the last step is missing
    bring("mib_seed1", steps=2, changed={"optim": configs["mib_seed1"]["optim"] | {"momentum": 0.5}})
    bring("step0_seed1", steps=1)  # no checkpoint to start from
    assert study.start("table1", "--dry-run") == 0
    shown = capsys.readouterr().out
    states = dict(re.findall(r"^(\w\S+_seed1) +(\w+(?: config)?) ", shown, re.MULTILINE))
    assert states.pop("mib_seed1") == "other config" and states.pop("ft_seed1") == "done"
    assert set(states.values()) == {"missing"} and len(states) == 4


def test_ctrl_c_reaches_runs_as_one_sigterm(study):
    study.behave("step0_seed1", "hang")
    assert start_and_signal(study, signal.SIGINT) == 75
    log = study.log("step0_seed1")
    assert log.count("saved after signal 15") == 1 and study.calls == NAMES[:1]
    assert "own session True" in log  # so that the terminal does not signal it a second time


def start_and_signal(study: Study, number: int, *more: str) -> int:
    """Start, and signal this process as soon as a run hangs."""

    def send() -> None:
        patience = time.monotonic() + 240
        while not hanging.exists() and time.monotonic() < patience:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    hanging = study.folder / "hanging"
    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    code = study.start("table1", *more)
    assert hanging.exists(), "no run has come to hang"
    return code


def spoil(study, run: str, old: str, new: str, unfinished: str) -> None:
    """Another config in the folder of `run`, and something left to do."""
    config = study.runs / run / "config.yaml"
    config.write_text(config.read_text().replace(old, new))
    (study.runs / unfinished / "results.json").unlink()
    study.forget_calls()


def test_a_folder_with_another_config_is_named_and_does_not_stop_the_rest(study, capsys):
    assert study.start("table1") == 0
    spoil(study, "mib_seed1", "lr: 0.05", "lr: 0.07", unfinished="joint_seed1")
    capsys.readouterr()
    assert study.start("table1") == 1
    shown = capsys.readouterr().out
    assert study.calls == ["joint_seed1"]
    assert f"failed: mib_seed1, {study.runs}/mib_seed1 holds a run with another config:" in shown
    assert "optim.lr: 0.07 -> 0.05" in shown and "move the folder away" in shown


def test_a_step_0_with_another_config_is_not_started_from(study, capsys):
    assert study.start("table1") == 0
    spoil(study, "step0_seed1", "epochs: 12", "epochs: 13", unfinished="ft_seed1")
    assert study.start("table1") == 1
    shown = capsys.readouterr().out
    assert study.calls == [] and "skipped: ft_seed1, for it starts from step0_seed1" in shown
    assert "6 runs: 4 done, 1 failed, 1 skipped" in shown


def test_what_does_not_change_a_result_may_differ(study, tmp_path, capsys):
    assert study.start("table1") == 0
    study.forget_calls()
    study.overrides += ["data.workers=1", "run.log_every=3"]
    assert study.start("table1") == 0
    assert study.calls == [] and "6 runs: 6 done" in capsys.readouterr().out


def test_a_run_that_fails_does_not_stop_the_others(study, capsys):
    study.behave("mib_seed1", "fail")
    study.behave("joint_seed1", "die")
    assert study.start("table1") == 1
    shown = capsys.readouterr().out
    assert study.calls == NAMES and "6 runs: 4 done, 2 failed" in shown
    failed, died = shown.split("failed: ")[1:]
    assert failed.startswith(f"mib_seed1, the end of {study.runs}/mib_seed1.log:")
    assert "  100%\n  the last words\n  train.py ended with exit code 3\n" in failed and "10%\r" not in failed
    assert "exit code -9" in died


def test_what_needs_a_failed_step_0_is_skipped(study, capsys):
    study.behave("step0_seed1", "fail")
    assert study.start("table1") == 1
    shown = capsys.readouterr().out
    assert study.calls == ["step0_seed1", "lwf_mc_seed1", "joint_seed1"]
    assert "6 runs: 2 done, 1 failed, 3 skipped" in shown
    assert "[2/6] ft_seed1: skipped, for it starts from step0_seed1" in shown
    study.behave("step0_seed1", "")
    study.forget_calls()
    assert study.start("table1") == 0
    assert study.calls == ["step0_seed1", "ft_seed1", "mib_seed1", "mib-altersgd_seed1"]


def test_a_step_0_is_trained_again_only_for_somebody(study, capsys):
    assert study.start("table1") == 0
    (study.runs / "step0_seed1/step_0.pt").unlink()
    study.forget_calls()
    assert study.start("table1") == 0
    assert study.calls == [] and "not needed" in capsys.readouterr().out
    (study.runs / "ft_seed1/results.json").unlink()
    assert study.start("table1") == 0
    assert study.calls == ["step0_seed1", "ft_seed1"]


def test_damaged_results_are_left_to_train_py(study):
    assert study.start("table1") == 0
    (study.runs / "ft_seed1/results.json").write_text("{")
    study.forget_calls()
    assert study.start("table1") == 0
    assert study.calls == ["ft_seed1"]


def test_several_runs_at_once_share_the_threads(study):
    study.behave("step0_seed1", "hang")  # the others that need no step 0 get their turn beside it

    def let_go() -> None:
        joint = study.runs / "joint_seed1/results.json"
        while not joint.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=let_go, daemon=True).start()
    assert study.start("table1", "--jobs", "2", "--threads", "6") == 75
    assert sorted(study.calls) == sorted(["step0_seed1", "lwf_mc_seed1", "joint_seed1"])
    assert "threads 3\n" in study.log("joint_seed1")


def test_commands():
    assert train_command() == (sys.executable, "train.py")
    assert train_command(4)[1:] == (
        *("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4"),
        "train.py",
    )


# ---- submitit ----------------------------------------------------------------------------------------------


class Stop:
    requested = False


def fake_tasks(study: Study, *names: str) -> list[Task]:
    """The first is the step 0 of the others."""
    for name in names:
        (study.folder / "configs" / f"{name}.yaml").write_text("")
    first = names[0]
    command = (sys.executable, str(study.fake), f"run.folder={study.runs}")
    return [
        Task(
            name, (*command, f"run.name={name}"), study.runs / f"{name}.log", None if name == first else first
        )
        for name in names
    ]


def test_without_submitit_the_error_says_what_to_install(study, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert study.start("table1", "--launcher", "slurm") == 2
    assert "pip install submitit" in capsys.readouterr().err and study.calls == []


@pytest.mark.slow
def test_submitit_runs_all_in_order(study, capsys):
    pytest.importorskip("submitit")
    study.behave("mib_seed1", "fail")
    assert study.start("table1", "--launcher", "submitit-local") == 1
    shown = capsys.readouterr().out
    assert sorted(study.calls) == sorted(NAMES) and "6 runs: 5 done, 1 failed" in shown
    assert "train.py ended with exit code 3" in shown and "mib_seed1: submitted, log" in shown


@pytest.mark.slow
def test_submitit_skips_what_needs_a_failed_job(study):
    pytest.importorskip("submitit")
    study.behave("first", "fail")
    tasks = fake_tasks(study, "first", "second")
    events = list(run_on_cluster(tasks, Stop(), study.folder / "submitit", "local"))
    assert [(task.name, event) for task, event in events] == [
        ("first", Event.SUBMITTED),
        ("first", Event.FAILED),
        ("second", Event.SKIPPED),
    ]


@pytest.mark.slow
def test_a_job_that_has_to_make_room_saves_is_queued_again_and_goes_on(study):
    submitit = pytest.importorskip("submitit")
    study.behave("first", "hang")
    (task,) = fake_tasks(study, "first")
    executor = submitit.AutoExecutor(study.folder / "submitit", cluster="local")
    executor.update_parameters(timeout_min=60)
    job = executor.submit(Training(task.command, task.log, threads=3))
    while not (study.folder / "hanging").exists():
        assert not job.done(), job.stderr()
        time.sleep(0.1)
    # Slurm signals all processes of a job; the first one here is submitit's stand-in for Slurm.
    for pid in process_tree(int(job.job_id))[1:]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR2)
    job.result()
    log = task.log.read_text()
    assert study.calls == ["first", "first"] and log.count("threads 3") == 2
    assert log.count("saved after signal") == 1 and log.index("saved after signal") < log.index("going on")


@pytest.mark.slow
def test_an_interrupt_cancels_the_jobs_of_submitit(study, capsys):
    pytest.importorskip("submitit")
    study.behave("step0_seed1", "hang")
    assert start_and_signal(study, signal.SIGTERM, "--launcher", "submitit-local") == 75
    assert "step0_seed1: stopped" in capsys.readouterr().out
    while "saved after signal" not in study.log("step0_seed1"):
        time.sleep(0.1)


FAKE_SLURM = {
    "srun": "",
    "sbatch": 'n=$(ls "$SLURM_FAKE" | wc -l); cp "$1" "$SLURM_FAKE/job_$n"; echo "Submitted batch job 10$n"',
    "scancel": 'echo "$@" >>"$SLURM_FAKE.cancelled"',
    "squeue": 'for n in 0 1 2 3; do for i in "" _0 _1; do echo "10$n$i|CANCELLED"; done; done',
}


@pytest.fixture
def slurm(study, monkeypatch):
    """Slurm's programs, some of them as told; returns the folder of the jobs that were given to it."""
    pytest.importorskip("submitit")
    jobs, programs = study.folder / "jobs", study.folder / "bin"
    jobs.mkdir()
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_FAKE", str(jobs))
    monkeypatch.setattr("study.slurm.POLL_SECONDS", 0.01)
    for name in ("SECONDS_BETWEEN_LOOKS", "SECONDS_BETWEEN_LAST_LOOKS", "PATIENCE_SECONDS"):
        monkeypatch.setattr(f"study.slurm.{name}", 0)

    def install(**scripts: str) -> Path:
        for name, script in (FAKE_SLURM | scripts).items():
            (programs / name).write_text(f"#!/bin/bash\n{script}\n")
            (programs / name).chmod(0o755)
        return jobs

    return install


def test_slurm_gets_arrays_that_wait_for_their_step_0(study, slurm):
    jobs = slurm()
    tasks = fake_tasks(study, "a0", "a1", "a2") + fake_tasks(study, "b0", "b1")
    stop = Stop()
    events = run_on_cluster(
        tasks, stop, study.folder / "submitit", gpus=2, options={"slurm_partition": "gpu", "timeout_min": 30}
    )
    for _ in tasks:
        assert next(events)[1] == Event.SUBMITTED
    stop.requested = True
    assert {event for _, event in events} <= {Event.STOPPED, Event.SKIPPED}
    texts = [(jobs / f"job_{n}").read_text() for n in range(3)]
    assert "--array=0-1" in texts[0] and "dependency" not in texts[0]
    assert "--array=0-1" in texts[1] and "--dependency=afterok:100_0" in texts[1]
    assert "--array" not in texts[2] and "--dependency=afterok:100_1" in texts[2]
    for text in texts:
        assert "--partition=gpu" in text and "--time=30" in text and "--gpus-per-node=2" in text
    cancelled = Path(f"{jobs}.cancelled").read_text().split()
    assert sorted(set(cancelled)) == ["100_0", "100_1", "101_0", "101_1", "102"]


NO_GPUS = 'echo "sbatch: error: Invalid generic resource (gres) specification" >&2; exit 1'


def test_a_cluster_without_gpus_is_explained(study, slurm, capsys):
    slurm(sbatch=NO_GPUS)
    assert study.start("table1", "--launcher", "slurm") == 2
    shown = capsys.readouterr().err
    assert "Invalid generic resource" in shown and "--gpus 0 asks for none" in shown


def test_a_submission_that_fails_leaves_no_jobs_behind(study, slurm):
    """The first array is queued, the second, which waits for it, is refused."""
    jobs = slurm(sbatch=f'[ -e "$SLURM_FAKE/job_0" ] && {{ {NO_GPUS}; }}\n{FAKE_SLURM["sbatch"]}')
    with pytest.raises(launchers.LauncherError, match="Slurm refuses the jobs"):
        list(run_on_cluster(fake_tasks(study, "a0", "a1"), Stop(), study.folder / "submitit"))
    for _ in range(100):  # scancel is not waited for
        if Path(f"{jobs}.cancelled").exists():
            break
        time.sleep(0.05)
    assert Path(f"{jobs}.cancelled").read_text().split() == ["100"]


def test_a_job_that_vanishes_has_failed_and_squeue_may_be_silent_for_a_while(study, slurm, capfd):
    jobs = slurm(
        squeue='echo "$@" >>"$SLURM_FAKE.asked"; n=$(wc -l <"$SLURM_FAKE.asked"); '
        '[ $n != 3 ] || { echo "no controller" >&2; exit 1; }; [ $n -gt 4 ] || echo "100|RUNNING"',
    )
    (task,) = fake_tasks(study, "only")
    study.runs.mkdir()
    events = [event for _, event in run_on_cluster([task], Stop(), study.folder / "submitit")]
    assert events == [Event.SUBMITTED, Event.FAILED]
    assert capfd.readouterr().err.count("squeue does not answer (no controller)") == 1
    asked = Path(f"{jobs}.asked").read_text()
    assert "--states=all" in asked and "--array" in asked and len(asked.splitlines()) == 5
    assert task.log.read_text() == "Slurm's job 100 ended without a result; its state: not in the queue\n"


# ---- running: train.py itself ------------------------------------------------------------------------------

SMALL = (
    *("data.crop=32", "data.workers=0", "model.head_channels=8", "train.batch_size=4", "train.device=cpu"),
    *(
        "train.epochs=30",
        "train.epochs_later=3",
        "run.log_every=1",
        "run.checkpoint_every=2",
        "run.tracker=none",
    ),
)


@pytest.mark.slow
def test_killed_and_interrupted_runs_end_like_undisturbed_ones(tmp_path, toy_voc, monkeypatch, capsys):
    few = [experiments.method("ewc"), experiments.method("lwf_mc"), mib(plus="altersgd")]
    monkeypatch.setitem(TABLES, "table1", lambda data: few)
    studies = []
    for name in ("whole", "pieces"):
        (tmp_path / name).mkdir()
        studies.append(Study(tmp_path / name, toy_voc, *SMALL))
    whole, pieces = studies
    for job in whole.jobs("table1"):  # left alone, in this process
        assert train.main(list(job.arguments)) == 0

    at_step_0(pieces, lambda pid: os.kill(pid, signal.SIGKILL))
    assert pieces.start("table1", "--threads", "1", real=True) == 1  # LwF-MC needs no step 0
    assert "4 runs: 1 done, 1 failed, 2 skipped" in capsys.readouterr().out
    at_step_0(pieces, lambda pid: os.kill(os.getpid(), signal.SIGTERM))
    assert pieces.start("table1", "--threads", "1", real=True) == 75
    assert "step0_seed1: stopped" in capsys.readouterr().out
    assert pieces.start("table1", "--threads", "1", real=True) == 0
    assert pieces.log("step0_seed1").count("resuming step 0") == 2

    for name in ("step0", "ewc", "lwf_mc", "mib-altersgd"):
        a, b = (read_results(study.runs / f"{name}_seed1/results.json")["steps"] for study in studies)
        assert len(a) == (1 if name == "step0" else 2)
        assert [step["confusion"] for step in a] == [step["confusion"] for step in b]


def at_step_0(study: Study, act) -> None:
    """Once the run `step0_seed1` has written one more checkpoint inside its step, call `act` with its
    process."""
    resume = study.runs / "step0_seed1/resume.pt"

    def written() -> int:
        try:
            return resume.stat().st_mtime_ns
        except FileNotFoundError:  # also for a moment while a new one takes its place
            return 0

    before = written()

    def watch() -> None:
        while written() in (0, before):
            time.sleep(0.01)
        for pid in process_tree(os.getpid())[1:]:
            if b"run.name=step0_seed1" in Path(f"/proc/{pid}/cmdline").read_bytes():
                act(pid)

    threading.Thread(target=watch, daemon=True).start()


@pytest.mark.slow
def test_torchrun_trains_a_run_in_two_processes(tmp_path, toy_voc):
    study = Study(tmp_path, toy_voc, *SMALL, "train.epochs=1")
    job = next(job for job in study.jobs("table1") if job.name == "joint_seed1")
    task = Task(job.name, (*train_command(2), *job.arguments), study.runs / "joint_seed1.log")
    assert [event for _, event in run_here([task], Stop(), threads=1)] == [Event.STARTED, Event.DONE], (
        task.log.read_text()
    )
    assert read_results(study.runs / "joint_seed1/results.json")["environment"]["world_size"] == 2
