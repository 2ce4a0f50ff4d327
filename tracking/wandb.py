"""Curves, metrics and drawings in Weights & Biases, under the names that TensorBoard shows.

What W&B has been told it cannot forget, so wandb.json in the run's folder keeps the id of its run and, of
every name, the last iteration that was sent: a run that resumes from an earlier iteration says only what
is new. The environment variables of W&B hold (WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY, ...).
"""

import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
from tqdm import tqdm

from configs import yaml_core
from configs.registry import Conflicts
from tracking.pictures import Drawn
from tracking.shown import AFTER_EACH_STEP, shown_by_step, with_live
from tracking.text import printable
from tracking.tracker import metrics_of, register

PROJECT = "continual-segmentation"
SECONDS_FOR_THE_NETWORK = 60  # to begin, to log in by hand, and to send what is left at the end


@register("wandb")
class WeightsAndBiases(Drawn):
    run: Any = None  # of wandb, which takes a second to import
    address: str | None = None  # where the run is looked at, if it is online

    @classmethod
    def conflicts(cls, config: Any) -> Conflicts:
        found = importlib.util.find_spec("wandb")
        if found is None or found.origin is None:  # a mere folder of this name, such as one that W&B writes
            yield "run.tracker", "'wandb' needs a package that is not installed: pip install wandb"

    @property
    def place(self) -> str:
        return f"{self.folder}: W&B's run"

    @cached_property
    def is_new(self) -> bool:
        return not self.memory["said"]

    @cached_property
    def memory(self) -> dict[str, Any]:
        """What the folder knows of the run in W&B: its id, the number of rows sent,
        and the last iteration of each name.
        """
        try:
            known = json.loads((self.folder / "wandb.json").read_bytes())
            return {"id": str(known["id"]), "rows": int(known["rows"]), "said": dict(known["said"])}
        except (OSError, ValueError, TypeError, KeyError):
            return {"id": os.urandom(6).hex(), "rows": 0, "said": {}}

    def open(self, at: int | None = None) -> None:
        if self.run is not None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        mode = os.environ.get("WANDB_MODE")
        try:
            self.run = self._begin(mode)
        except Exception as error:  # nobody has logged in, or there is no network
            if mode == "offline":
                raise
            self.run = self._begin("offline")
            why = printable(f"{type(error).__name__}: {error}".splitlines()[0])
            tqdm.write(f"note: W&B is not reached ({why}); its run is kept offline", file=sys.stderr)
        for names, against in (("*", "iteration"), ("by_step/*", "step"), (f"{AFTER_EACH_STEP}/*", "step")):
            self.run.define_metric(names, step_metric=against)
        self.address = None if self.run.offline else self.run.url
        self._remember()

    def scalars(self, values: Mapping[str, float | None], at: int) -> None:
        self._say(with_live(values), "iteration", at)

    def results(self, result: dict, at: int) -> None:
        self._say(metrics_of(result), "iteration", at)
        self._say(shown_by_step(result), "step", result["step"])

    def show(self, tag: str, pixels: np.ndarray, at: int) -> None:
        import wandb

        self._say({tag: wandb.Image(pixels)}, "iteration", at)

    def close(self) -> None:
        run, self.run = self.run, None
        if run is not None:
            run.finish()

    def watch(self, runs: str) -> str | None:
        if self.address:
            return self.address
        return f"wandb sync --append {self.folder}/wandb/offline-run-*   (each once, in this order)"

    def _say(self, values: Mapping[str, Any], against: str, at: int) -> None:
        """Send a row of what has not been said yet; W&B's own steps are rows, which only ever grow."""
        said = self.memory["said"]
        news = {printable(name): v for name, v in values.items() if v is not None}
        news = {name: value for name, value in news.items() if said.get(name, -1) < at}
        if news:
            self.run.log(news | {against: at}, step=self.memory["rows"], commit=True)
            self.memory["rows"] += 1
            said |= dict.fromkeys(news, at)
            self._remember()

    def _remember(self) -> None:
        beside = self.folder / ".wandb.json.tmp"
        beside.write_text(json.dumps(self.memory), encoding="utf-8")
        os.replace(beside, self.folder / "wandb.json")

    def _begin(self, mode: Any) -> Any:
        import wandb

        is_evaluation = self.folder.parent.name == "evaluations"
        name = "/".join(self.folder.parts[-3::2]) if is_evaluation else self.folder.name
        settings = wandb.Settings(
            console="off",  # the terminal is not W&B's
            silent=True,
            reinit="create_new",
            init_timeout=SECONDS_FOR_THE_NETWORK,
            login_timeout=SECONDS_FOR_THE_NETWORK,
            finish_timeout=SECONDS_FOR_THE_NETWORK,
        )
        return wandb.init(
            dir=str(self.folder),
            id=self.memory["id"],
            resume="allow",
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=name,
            config=yaml_core.parse(self.about) or {},
            mode=mode,
            settings=settings,
        )
