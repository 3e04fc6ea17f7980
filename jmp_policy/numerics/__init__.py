"""Whether mixed precision worked: which operations run in which dtype, and where that loses numbers."""

from ._audit import audit as audit
from ._report import (
    FINDINGS as FINDINGS,
    AuditReport as AuditReport,
    AuditRow as AuditRow,
    Finding as Finding,
    Matmul as Matmul,
)
