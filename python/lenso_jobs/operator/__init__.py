"""What operators do to an Instance, from setting it up to taking it down."""

from lenso_jobs.operator._changes import Changes
from lenso_jobs.operator._check import Finding, check
from lenso_jobs.operator._parts import Part
from lenso_jobs.operator._plan import Plan, find_changes, plan
from lenso_jobs.operator._session import CannotTell, OperatorError
from lenso_jobs.operator._setup import (
    SetupReport,
    UpgradeReport,
    configure,
    setup,
    upgrade,
)
from lenso_jobs.operator._uninstall import Removal, survey, uninstall

__all__ = [
    "CannotTell",
    "Changes",
    "Finding",
    "OperatorError",
    "Part",
    "Plan",
    "Removal",
    "SetupReport",
    "UpgradeReport",
    "check",
    "configure",
    "find_changes",
    "plan",
    "setup",
    "survey",
    "uninstall",
    "upgrade",
]
