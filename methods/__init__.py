"""Methods, phases, update rules and averages.

A new one is one new file in this folder, in phases/, updates/ or averages/.
"""

from methods.averages.none import AVERAGES, Average, make_average
from methods.base import (
    METHODS,
    Batch,
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
    "AVERAGES",
    "METHODS",
    "PHASES",
    "UPDATES",
    "AlterSGD",
    "Average",
    "Batch",
    "Consolidate",
    "Descent",
    "Evaluate",
    "Method",
    "Output",
    "Update",
    "Weights",
    "WithObservers",
    "make_average",
    "make_method",
    "make_phase",
    "make_update",
    "published_strength",
    "register",
]
