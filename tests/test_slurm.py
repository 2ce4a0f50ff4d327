"""The launcher and the script of docs/running.md on a real Slurm, which scripts/dev/slurm_here.sh starts."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_docs import FIRST_LINE_OF_A_SCRIPT, ROOT, split
from test_launchers import Study, start_and_signal

from study import slurm
from study.experiments import TABLES
from study.launchers import Event, LauncherError, Task
from study.slurm import run_on_cluster

HERE = ROOT / "scripts/dev/slurm_here.sh"
PREEMPTS = (
    *("PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE"),
    "PartitionName=all Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=20",
    "PartitionName=urgent Nodes=ALL PriorityTier=9 PreemptMode=OFF",
)

# Stands in for train.py: counts, saves when it is told to stop, resumes, and ends with a number that depends
# on every count. It hangs in the middle until it has been stopped once or it is enough, if it is told to.
COUNTS = """
import json, os, pathlib, signal, sys, time
folder, behaviour = pathlib.Path(sys.argv[1]), sys.argv[2]
folder.mkdir(parents=True, exist_ok=True)
told = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: told.append(1))
state = folder / "resume.json"
resumed = state.exists()
count, chain = json.loads(state.read_text()) if resumed else (0, 0)
job = os.environ.get("SLURM_ARRAY_JOB_ID", os.environ["SLURM_JOB_ID"])
task = os.environ.get("SLURM_ARRAY_TASK_ID")
with open(folder / "jobs", "a") as jobs:
    print(f"{job}_{task}" if task else job, file=jobs)
while count < 10:
    if told:
        state.write_text(json.dumps([count, chain]))
        sys.exit(75)
    if count == 5 and behaviour == "fail":
        sys.exit("the last words")
    if count == 5 and behaviour == "die":
        os.kill(os.getppid(), signal.SIGKILL)
    if count == 5 and behaviour == "hang" and not resumed and not (folder / "enough").exists():
        time.sleep(0.05)
        continue
    count, chain = count + 1, (31 * chain + count) % 2**61
(folder / "result").write_text(str(chain))
"""


class Cluster:
    """A Slurm of two nodes, and runs on it."""

    def __init__(self, folder: Path):
        self.folder, self.runs = folder, folder / "runs"
        self.stand_in = folder / "counts.py"
        self.stand_in.write_text(COUNTS)

    def task(self, name: str, behaviour: str = "", needs: str | None = None) -> Task:
        command = (sys.executable, "-S", str(self.stand_in), str(self.runs / name), behaviour)
        return Task(name, command, self.runs / f"{name}.log", needs)

    def launch(self, *tasks: Task, stop: object = None) -> dict[str, Event]:
        """Return how each task ended."""
        self.runs.mkdir(exist_ok=True)
        stop = stop or SimpleNamespace(requested=False)
        events = run_on_cluster(tasks, stop, self.folder / "submitit", gpus=0)
        return {task.name: event for task, event in events}

    def job(self, name: str) -> str:
        """Return the number of the job of a task, once it runs."""
        wait_for((self.runs / name / "jobs").exists)
        time.sleep(0.3)  # it has not got to its middle
        return (self.runs / name / "jobs").read_text().split()[0]

    def starts(self, name: str) -> int:
        return len((self.runs / name / "jobs").read_text().split())

    def result(self, name: str) -> str:
        return (self.runs / name / "result").read_text()


def wait_for(condition: Callable[[], object], seconds: float = 240) -> None:
    patience = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < patience
        time.sleep(0.05)


def ask(*command: str) -> str:
    return subprocess.run(command, check=True, timeout=240, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def slurm_here(tmp_path_factory) -> Iterator[Path]:
    """The folder of a Slurm with two nodes of four GPUs, by its books; its partition `urgent` preempts."""
    missing = ask("bash", str(HERE), "missing").strip()
    if missing:
        pytest.skip(missing)
    folder = tmp_path_factory.mktemp("slurm")
    settings = [part for line in PREEMPTS for part in ("--conf", line)]
    ask("bash", str(HERE), "start", "--gpus", "4", "--folder", str(folder), *settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        yield folder
    ask("bash", str(HERE), "stop", str(folder))
    assert not folder.exists()


@pytest.fixture
def cluster(slurm_here, tmp_path, monkeypatch) -> Cluster:
    pytest.importorskip("submitit")
    monkeypatch.setattr(slurm, "SECONDS_BETWEEN_LOOKS", 1.0)
    monkeypatch.setattr(slurm, "PATIENCE_SECONDS", 3.0)
    put_in_order()
    return Cluster(tmp_path)


def put_in_order() -> None:
    """No test inherits a job of another, or a node that another has lost."""
    ask("scancel", "--user=root")
    wait_for(lambda: not ask("squeue", "--noheader"))
    states = dict(
        line.split() for line in ask("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
    )
    for node in (node for node, state in states.items() if state.startswith(("down", "drain"))):
        ask("scontrol", "update", f"nodename={node}", "state=RESUME")
    wait_for(lambda: set(ask("sinfo", "--noheader", "--Node", "--format=%T").split()) == {"idle"})


@pytest.fixture
def meanwhile() -> Iterator[Callable[..., None]]:
    """Runs something while the test waits, and passes on what goes wrong in it."""
    threads, problems = [], []

    def begin(action: Callable[[], object]) -> None:
        def act() -> None:
            try:
                action()
            except Exception as error:
                problems.append(error)

        threads.append(threading.Thread(target=act))
        threads[-1].start()

    yield begin
    for thread in threads:
        thread.join()
    assert not problems, problems


@pytest.mark.slow
def test_jobs_that_are_disturbed_end_like_one_that_is_left_alone(cluster, meanwhile):
    tasks = [
        *(cluster.task("alone"), cluster.task("after alone", needs="alone")),
        *(cluster.task("requeued", "hang"), cluster.task("after requeued", needs="requeued")),
        *(cluster.task("broken", "fail"), cluster.task("after broken", needs="broken")),
        *(cluster.task("cancelled", "hang"), cluster.task("after cancelled", needs="cancelled")),
        *(cluster.task("out of time", "hang"), cluster.task("lost", "die")),
    ]

    def disturb() -> None:
        ask("scontrol", "requeue", cluster.job("requeued"))
        ask("scancel", cluster.job("cancelled"))
        # as Slurm does before a job's time is over, which is a minute at least
        ask("scancel", "--signal=USR2", cluster.job("out of time"))

    meanwhile(disturb)
    ended = cluster.launch(*tasks)
    done = {name for name, event in ended.items() if event == Event.DONE}
    assert done == {"alone", "after alone", "requeued", "after requeued", "out of time"}
    assert {cluster.result(name) for name in done} == {cluster.result("alone")}
    assert cluster.starts("requeued") == cluster.starts("out of time") == 2
    assert ended["broken"] == ended["lost"] == Event.FAILED and ended["cancelled"] == Event.STOPPED
    assert ended["after broken"] == ended["after cancelled"] == Event.SKIPPED
    assert "the last words\ntrain.py ended with exit code 1\n" in (cluster.runs / "broken.log").read_text()
    assert re.search(r"Slurm's job \S+ ended without a result", (cluster.runs / "lost.log").read_text())
    assert cluster.launch(cluster.task("cancelled", "hang")) == {"cancelled": Event.DONE}
    assert cluster.result("cancelled") == cluster.result("alone")


@pytest.mark.slow
def test_a_job_that_is_preempted_and_one_whose_node_goes_down(cluster, meanwhile):
    def preempt() -> None:
        cluster.job("preempted")
        ask("srun", "--partition=urgent", "--nodes=2", "--exclusive", "true")

    def take_the_node_down() -> None:
        node = ask("squeue", "--noheader", f"--jobs={cluster.job('on a node')}", "--format=%N").strip()
        ask("scontrol", "update", f"nodename={node}", "state=DOWN", "reason=test")

    for name, disturb in {"preempted": preempt, "on a node": take_the_node_down}.items():
        meanwhile(disturb)
        assert cluster.launch(cluster.task(name, "hang")) == {name: Event.DONE}
        assert cluster.starts(name) == 2
    assert cluster.result("on a node") == cluster.result("preempted")


@pytest.mark.slow
def test_a_launcher_that_was_killed_finds_its_jobs_again_and_a_controller_may_restart(
    cluster, slurm_here, meanwhile, capfd
):
    tasks = [cluster.task("first", "hang"), cluster.task("second", needs="first")]
    cluster.runs.mkdir()
    events = run_on_cluster(tasks, SimpleNamespace(requested=False), cluster.folder / "submitit", gpus=0)
    assert [next(events)[1] for _ in tasks] == [Event.SUBMITTED] * 2
    events.close()

    def restart() -> None:
        job, before = cluster.job("first"), time.time()
        ask("scontrol", "update", f"jobid={job}", "comment=now Slurm writes down what it knows, in a while")
        wait_for(lambda: (slurm_here / "state/job_state").stat().st_mtime > before)
        file = slurm_here / "slurmctld.pid"
        controller = int(file.read_text())
        os.kill(controller, signal.SIGKILL)
        file.unlink()
        wait_for(lambda: "squeue does not answer" in capfd.readouterr().err)
        ask("slurmctld")
        (cluster.runs / "first/enough").touch()

    meanwhile(restart)
    assert cluster.launch(*tasks) == {"first": Event.DONE, "second": Event.DONE}
    assert cluster.starts("first") == cluster.starts("second") == 1


def test_gpus_that_the_cluster_has_not(cluster):
    events = run_on_cluster(
        [cluster.task("one")], SimpleNamespace(requested=False), cluster.folder / "submitit", gpus=8
    )
    with pytest.raises(LauncherError, match="--gpus 0 asks for none"):
        next(events)


@pytest.mark.slow
@pytest.mark.usefixtures("at_the_root")
def test_ctrl_c_and_the_same_command_again(cluster, toy_voc, capsys, monkeypatch):
    study = Study(cluster.folder, toy_voc)
    whole = TABLES["table1"]
    monkeypatch.setitem(TABLES, "table1", lambda data: [e for e in whole(data) if e.name == "mib"])
    study.behave("step0_seed1", "hang")
    assert start_and_signal(study, signal.SIGINT, "--launcher", "slurm") == 75
    assert "2 runs: 2 stopped" in capsys.readouterr().out
    assert ask("squeue", "--noheader").strip() == ""
    assert study.start("table1", "--launcher", "slurm") == 0
    assert study.calls == ["step0_seed1", "step0_seed1", "mib_seed1"]
    assert "going on" in study.log("step0_seed1")


@pytest.mark.slow
def test_the_script_of_the_manual_saves_both_ranks_and_queues_again(cluster, meanwhile):
    """On two nodes; all that is changed is what it starts there, and the place of its output."""
    (block,) = [b for b in split(ROOT / "docs/running.md")[0] if b.text.startswith(FIRST_LINE_OF_A_SCRIPT)]
    stand_in = f"{sys.executable} -S {cluster.stand_in} {cluster.runs}/rank_$SLURM_PROCID hang"
    changes = {"=mib.log": f"={cluster.folder}/log", "torchrun": f"bash -c '{stand_in}' --"}
    text = block.text
    for old, new in changes.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    script = cluster.folder / "job.sh"
    script.write_text(text)

    def disturb() -> None:
        job, _ = (cluster.job(name) for name in ("rank_0", "rank_1"))
        ask("scancel", "--batch", "--signal=TERM", job)  # as Slurm does two minutes before its time is over

    meanwhile(disturb)
    subprocess.run(["sbatch", "--wait", str(script)], check=True, timeout=240)
    for name in ("rank_0", "rank_1"):
        assert cluster.starts(name) == 2 and (cluster.runs / name / "resume.json").exists()
    assert cluster.result("rank_0") == cluster.result("rank_1")
