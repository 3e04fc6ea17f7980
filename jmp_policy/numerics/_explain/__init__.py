"""`jmp_policy.explain`: the policy of each module of a model, and the dtypes of a traced call."""

from ._explanation import Explanation as Explanation, ModuleRow as ModuleRow
from ._operations import explain as explain
