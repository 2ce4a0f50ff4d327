"""Clusters that keep no accounts: squeue tells submitit what becomes of jobs, where sacct cannot."""

import getpass
import subprocess


def keeps_accounts() -> bool:
    try:
        return subprocess.run(["sacct", "--noheader"], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def ask_the_queue() -> None:
    """Without accounts submitit would warn every second, and wait for ever for a job that died."""
    from submitit.slurm.slurm import SlurmInfoWatcher, SlurmJob

    class Queue(SlurmInfoWatcher):
        def _make_command(self) -> list[str] | None:
            waiting = self._registered - self._finished
            user = getpass.getuser()
            return (
                ["squeue", "--noheader", "--states=all", f"--user={user}", "--format=%i|%T"]
                if waiting
                else None
            )

        def read_info(self, string: bytes | str) -> dict[str, dict[str, str]]:
            lines = string if isinstance(string, str) else string.decode()
            found = super().read_info("JobID|State\n" + lines)
            # Slurm shows a job for some minutes after its end, and then no more.
            return found | {job: {"State": "GONE"} for job in self._info_dict if job not in found}

    SlurmJob.watcher = Queue(delay_s=30)
