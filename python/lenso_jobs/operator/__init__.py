"""What operators do to an Instance, from setting it up to taking it down."""

from lenso_jobs.operator._findings import Changes
from lenso_jobs.operator._fleet import (
    FleetError,
    check_fleet,
    configure_fleet,
    plan_fleet,
    setup_fleet,
    upgrade_fleet,
)
from lenso_jobs.operator._objects import Finding
from lenso_jobs.operator._parts import Part
from lenso_jobs.operator._plan import Plan, check, find_changes, plan, uncompared
from lenso_jobs.operator._session import CannotTell, OperatorError
from lenso_jobs.operator._setup import Report, configure, setup, upgrade
from lenso_jobs.operator._uninstall import Removal, survey, uninstall

__all__ = [
    "CannotTell",
    "Changes",
    "Finding",
    "FleetError",
    "OperatorError",
    "Part",
    "Plan",
    "Removal",
    "Report",
    "check",
    "check_fleet",
    "configure",
    "configure_fleet",
    "find_changes",
    "plan",
    "plan_fleet",
    "setup",
    "setup_fleet",
    "survey",
    "uncompared",
    "uninstall",
    "upgrade",
    "upgrade_fleet",
]
