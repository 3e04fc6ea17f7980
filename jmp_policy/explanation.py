"""The result of `jmp_policy.explain`: the policy and the dtypes of each module of a model."""

from .numerics._explain import Explanation as Explanation, ModuleRow as ModuleRow
