"""Every method and phase. A new method is one new file in this folder: it registers itself by being there."""

import importlib
import pkgutil

from methods.altersgd import PHASES, AlterSGD, Consolidate, make_phase
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
from methods.cpr import penalise_confidence
from methods.update import UPDATES, Evaluate, Update, make_update

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

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
    "penalise_confidence",
    "published_strength",
    "register",
]
