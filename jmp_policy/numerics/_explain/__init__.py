"""What holds where in a model, and what happened there when it was traced: the result of `jmp_policy.explain`."""

from ._explanation import Explanation as Explanation, Row as Row
from ._operations import explain as explain
