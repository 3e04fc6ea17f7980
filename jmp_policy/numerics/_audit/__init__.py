"""The audit: the jaxpr of a function, and findings in it."""

from ._audit import audit as audit, find_in_program as find_in_program
from ._report import (
    FINDINGS as FINDINGS,
    AuditReport as AuditReport,
    AuditRow as AuditRow,
    Finding as Finding,
    Matmul as Matmul,
)
