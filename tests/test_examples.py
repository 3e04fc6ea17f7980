"""Examples of the API run in an empty Python, by the `conftest.py` of the repository; here: which these are."""

import pytest
from public_names import is_public


@pytest.mark.parametrize(
    ("example", "public"),
    [
        ("jmp_policy.loss_scale._scaled_state.metrics", True),
        ("jmp_policy.policy._policy_map.PolicyMap.match", True),
        ("jmp_policy.optim._step.step", True),
        ("jmp_policy.report._report.Report", True),
        ("jmp_policy.compat.torch.loss_scale_from_state_dict", True),
        ("jmp_policy.compat.keras", True),
        ("jmp_policy.loss_scale._scaled_state.strip_variables", False),
        ("jmp_policy._base._float8_state.map_rest", False),
        ("jmp_policy.policy._policy_map.PolicyMap._default_policy", False),
        ("jmp_policy.compat.torch._read", False),
        ("jmp_policy._jaxpr._program.walk", False),
    ],
)
def test_examples_of_the_api_are_known_by_where_they_are_written(example, public):
    assert is_public(example) is public
