"""What operators do to an Instance: set it up, configure it, check it for drift."""

from lenso_jobs.operator._check import Finding, check
from lenso_jobs.operator._setup import OperatorError, SetupReport, configure, setup

__all__ = ["Finding", "OperatorError", "SetupReport", "check", "configure", "setup"]
