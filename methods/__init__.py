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

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "METHODS",
    "PHASES",
    "AlterSGD",
    "Consolidate",
    "Descent",
    "Method",
    "Weights",
    "WithObservers",
    "make_method",
    "make_phase",
    "published_strength",
    "register",
]
