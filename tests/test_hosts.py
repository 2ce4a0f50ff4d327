"""Several hosts, as network namespaces of this machine: what happens when one is lost, and how soon."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from test_distributed import become_rank, free_port

from engine import heartbeat
from engine.heartbeat import Heartbeat
from engine.ranks import start_ranks
from engine.rendezvous import meet

ROOT = Path(__file__).parent.parent
PORT = 29500


class Hosts:
    """Two hosts with an address and a name of their own, and a cable between them."""

    def __init__(self) -> None:
        self.names = [f"host{number}x{os.getpid()}" for number in (1, 2)]
        self.processes: list[subprocess.Popen] = []
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        one, other = self.names
        ip(*f"-n {one} link add eth0 type veth peer name eth0 netns {other}".split())
        for number, name in enumerate(self.names, start=1):
            ip("-n", name, *f"addr add 10.77.0.{number}/24 dev eth0".split())
            self.cable(name, "up")

    def cable(self, name: str, state: str) -> None:
        ip("-n", name, "link", "set", "eth0", state)

    def start(self, number: int, log: Path, arguments: list[str]) -> subprocess.Popen:
        """Start train.py as the rank of this number, on the host of this number."""
        variables = {"RANK": number, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "10.77.0.1"}
        variables |= {"MASTER_PORT": PORT, "OMP_NUM_THREADS": 1, "LOST_RANK_SECONDS": 4}
        variables |= {"GLOO_SOCKET_IFNAME": "eth0"}
        with open(log, "ab") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.names[number], sys.executable, "train.py", *arguments],
                cwd=ROOT,
                env=os.environ | {name: str(value) for name, value in variables.items()},
                stdout=output,
                stderr=output,
            )
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True)
    if probe.returncode:
        pytest.skip(f"no network namespaces here: {probe.stderr.decode().strip()}")
    made = Hosts()
    yield made
    made.close()


@pytest.mark.slow
def test_a_host_that_is_cut_off_ends_the_run_on_both_which_say_why(hosts, toy_arguments, tmp_path):
    long = toy_arguments("run.checkpoint_every=1", "run.pictures=0", "train.epochs=1000")
    logs = [tmp_path / f"{number}.log" for number in (0, 1)]
    both = [hosts.start(number, log, long) for number, log in enumerate(logs)]
    wait_for((tmp_path / "runs/run/resume.pt").exists, both)
    hosts.cable(hosts.names[1], "down")
    assert [process.wait(timeout=60) for process in both] == [1, 1]
    first, second = (log.read_text() for log in logs)
    assert "error: nothing was heard of rank 1 on" in first
    assert "error: rank 1 on" in second
    assert "did not reach the ranks' meeting place at 10.77.0.1" in second


def wait_for(condition: Callable[[], object], processes: list[subprocess.Popen]) -> None:
    while not condition():
        assert [process.poll() for process in processes] == [None] * len(processes)
        time.sleep(0.05)


# ---- the heartbeat by itself -------------------------------------------------------------------------------

SECONDS = 0.5


@pytest.fixture
def beats(monkeypatch) -> Iterator[Callable[[int], Heartbeat]]:
    """Heartbeats of three ranks, in this process, which none of them ends."""
    monkeypatch.setattr(Heartbeat, "_watch", lambda self: None)
    address = ("127.0.0.1", free_port())
    store = dist.TCPStore(*address, is_master=True, wait_for_workers=False)
    made = []
    for rank in range(3):
        heartbeat.announce(dist.PrefixStore("attempt_0", store), rank)

    def begin(rank: int) -> Heartbeat:
        made.append(Heartbeat(address, "attempt_0", rank, ["a", "b", "c"], SECONDS))
        return made[-1]

    yield begin
    for beat in made:
        beat.stop()


def lost(beat: Heartbeat) -> str | None:
    return beat.lost(time.monotonic())


def test_ranks_that_live_are_not_lost_and_one_that_never_began_is(beats):
    first, _ = beats(0), beats(1)
    assert lost(first) is None
    while (said := lost(first)) is None:  # rank 2 has announced itself, and then died
        time.sleep(0.02)
    assert said.startswith("nothing was heard of rank 2 on c within 0.5 seconds (LOST_RANK_SECONDS)")
    for _ in range(20):
        time.sleep(SECONDS / 10)
        assert "rank 1" not in str(lost(first))


def test_a_rank_that_leaves_in_order_is_not_lost(beats):
    first, second, third = beats(0), beats(1), beats(2)
    second.stop()
    third.stop()
    for _ in range(30):
        time.sleep(SECONDS / 10)
        assert lost(first) is None


def test_a_meeting_place_that_is_out_of_reach_is_named(beats):
    first = beats(0)
    first.ended.set()  # as if its connection hung
    first.threads[0].join()
    first.heard = {1: ("7", time.monotonic())}
    while (said := lost(first)) is None:
        first.heard = {1: ("7", time.monotonic())}
        time.sleep(0.02)
    assert said.startswith("rank 0 on a did not reach the ranks' meeting place at 127.0.0.1:")


def die_after_checking_in(rank: int, port: int, log: str) -> None:
    become_rank(rank, 2, port)
    os.environ[heartbeat.LOST_AFTER] = "2"
    if rank == 1:
        meet(rank, 2, "gloo")
        os.kill(os.getpid(), signal.SIGKILL)
    os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY), 2)
    start_ranks("cpu")


@pytest.mark.slow
def test_a_rank_that_dies_between_checking_in_and_forming_the_group_is_not_waited_for(tmp_path):
    log = tmp_path / "log"
    context = multiprocessing.get_context("spawn")
    port = free_port()
    both = [context.Process(target=die_after_checking_in, args=(rank, port, str(log))) for rank in (0, 1)]
    for process in both:
        process.start()
    for process in both:
        process.join(timeout=100)
    assert [process.exitcode for process in both] == [1, -signal.SIGKILL]
    assert "nothing was heard of rank 1" in log.read_text()
