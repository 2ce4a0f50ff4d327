"""Every method and phase. A new method is one new file in this folder: it registers itself by being there."""

import importlib
import pkgutil

from methods.base import (
    METHODS,
    Descent,
    Method,
    Weights,
    WithObservers,
    make_method,
    published_strength,
    register,
)
from methods.phases.altersgd import PHASES, AlterSGD, Consolidate, make_phase
from methods.updates.plain import UPDATES, Evaluate, Update, make_update

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(_module.name)

__all__ = [
    "METHODS",
    "PHASES",
    "UPDATES",
    "AlterSGD",
    "Consolidate",
    "Descent",
    "Evaluate",
    "Method",
    "Update",
    "Weights",
    "WithObservers",
    "make_method",
    "make_phase",
    "make_update",
    "published_strength",
    "register",
]
