"""Instruments for mixed precision: the dtype of each operation, and where it loses values.

- `audit` traces a function and returns an `AuditReport`. An `AuditRow` has the operations of one kind, a `Matmul` the
  matmuls of one line, and a `Finding` an operation that is likely to lose values or time. `FINDINGS` explains them.
- `collect` wraps a function so that it also returns `Stats`: statistics of its tensors and the effect of formats.
  A `Row` is one tensor, with `FormatShares` for each format. A `StatsHistory` keeps statistics by step.
- `first_nonfinite` wraps a function so that it also returns a `NonfiniteOrigin`: the op that made the first nan or inf.
- `Explanation` is the result of `jmp_policy.explain`, with a `ModuleRow` for each module.
- `collectives` returns the `Collectives` of a program on a mesh: a `Collective` for each kind, dtype and line.
- `lock` wraps a function so that it returns a `Lock`: what it computes in which dtype, as `LockRow`s and the text of
  a file. `Lock.diff` returns a `LockDiff`, with a `Difference` for each change, and `assert_locked` is for tests.
- `predict` computes a `Prediction` from `Stats`: the scopes that a policy would break, each with a `Reason`, and the
  loss scale or float32 rules that fix it.
"""

import typing as _typing

from .._base import load_lazily as _load_lazily

if _typing.TYPE_CHECKING:
    from ._audit import audit as audit
    from ._audit_report import (
        FINDINGS as FINDINGS,
        AuditReport as AuditReport,
        AuditRow as AuditRow,
        Finding as Finding,
        Matmul as Matmul,
    )
    from ._collect import collect as collect
    from ._collectives import collectives as collectives
    from ._collectives_report import Collective as Collective, Collectives as Collectives
    from ._explanation import Explanation as Explanation, ModuleRow as ModuleRow
    from ._first_nonfinite import first_nonfinite as first_nonfinite
    from ._lock import assert_locked as assert_locked, lock as lock
    from ._lock_diff import Difference as Difference, LockDiff as LockDiff
    from ._lock_file import Lock as Lock
    from ._lock_rows import LockRow as LockRow
    from ._origin import NonfiniteOrigin as NonfiniteOrigin
    from ._predict import predict as predict
    from ._prediction import Prediction as Prediction, Reason as Reason
    from ._stats import Stats as Stats
    from ._stats_history import StatsHistory as StatsHistory
    from ._stats_row import FormatShares as FormatShares, Row as Row

    # for other packages of the library
    # isort: off
    # fmt: off
    from ._audit_report import PLATFORMS  # noqa: F401
    from ._explain import explain  # noqa: F401
    from ._first_nonfinite import search_nonfinite  # noqa: F401
    from ._lock import lock_like, name_locked_function  # noqa: F401
    from ._lock_file import load_lock  # noqa: F401
    from ._origin import say_what_happened  # noqa: F401
    from ._remedies import CARRIED  # noqa: F401
    from ._tune import check_budget, name_metric, tune  # noqa: F401
    from ._tune_search import Ranking, Subject, Trial, TrialLog, find_smallest_set, is_loss, wrap_narrow  # noqa: F401
    from ._tuning import CHOSEN, Tuning  # noqa: F401
    from ._widened import find_half_scopes, widen  # noqa: F401
    # fmt: on
    # isort: on
else:  # `optim` uses one of these and should not load the others
    _SOURCES = {
        "_audit": "audit",
        "_audit_report": "AuditReport AuditRow FINDINGS Finding Matmul",
        "_collect": "collect",
        "_collectives": "collectives",
        "_collectives_report": "Collective Collectives",
        "_explanation": "Explanation ModuleRow",
        "_first_nonfinite": "first_nonfinite",
        "_lock": "assert_locked lock",
        "_lock_diff": "Difference LockDiff",
        "_lock_file": "Lock",
        "_lock_rows": "LockRow",
        "_origin": "NonfiniteOrigin",
        "_predict": "predict",
        "_prediction": "Prediction Reason",
        "_stats": "Stats",
        "_stats_history": "StatsHistory",
        "_stats_row": "FormatShares Row",
    }
    _INTERNAL = {
        "_audit_report": "PLATFORMS",
        "_lock": "lock_like name_locked_function",
        "_lock_file": "load_lock",
        "_explain": "explain",
        "_first_nonfinite": "search_nonfinite",
        "_origin": "say_what_happened",
        "_remedies": "CARRIED",
        "_tune": "check_budget name_metric tune",
        "_tune_search": "Ranking Subject Trial TrialLog find_smallest_set is_loss wrap_narrow",
        "_tuning": "CHOSEN Tuning",
        "_widened": "find_half_scopes widen",
    }
    _MOVED = "Certificate Divergence OutputErrors ScopeErrors Worst certify diverge record"
    __getattr__, __dir__ = _load_lazily(
        __name__,
        _SOURCES,
        globals(),
        internal=_INTERNAL,
        unlisted="AuditReport AuditRow Collective Collectives Difference Explanation FINDINGS Finding FormatShares "
        "Lock LockDiff LockRow Matmul ModuleRow NonfiniteOrigin Prediction Reason Row Stats",
        elsewhere={name: f"contrib.{name}" for name in _MOVED.split()},
    )
