"""Methods, phases and update rules. A new one is one new file in this folder, in phases/ or in updates/."""

from methods.base import (
    METHODS,
    Method,
    Output,
    Weights,
    WithObservers,
    make_method,
    published_strength,
    register,
)
from methods.phases.altersgd import AlterSGD, Consolidate
from methods.phases.descent import PHASES, Descent, make_phase
from methods.updates.plain import UPDATES, Evaluate, Update, make_update

__all__ = [
    "METHODS",
    "PHASES",
    "UPDATES",
    "AlterSGD",
    "Consolidate",
    "Descent",
    "Evaluate",
    "Method",
    "Output",
    "Update",
    "Weights",
    "WithObservers",
    "make_method",
    "make_phase",
    "make_update",
    "published_strength",
    "register",
]
