"""Whether mixed precision worked: which operations run in which dtype, and where that loses numbers."""

from ._audit import audit as audit
from ._catalogue import FINDINGS as FINDINGS
from ._report import AuditReport as AuditReport, AuditRow as AuditRow, Finding as Finding, Matmul as Matmul
