"""The registry of policies: a law that takes `any_policy` holds for each of them."""

import pytest

import jmp_policy as jmp

POLICIES = [
    "float32",
    "bfloat16",
    "float16",
    "float64",
    "float8_e4m3fn",
    "mixed_float16",
    "mixed_bfloat16",
    "params=float32,compute=bfloat16,output=float32",
    "params=bfloat16,compute=float32,output=bfloat16",
    "params=none,compute=float16,output=none",
    "params=float32,compute=float16,output=float32,precision=highest",
    "params=float32,compute=float32,output=float32,precision=TF32_TF32_F32",
    "infer",
    "infer_float32_vars",
]


@pytest.fixture(params=POLICIES)
def any_policy(request: pytest.FixtureRequest) -> jmp.Policy:
    return jmp.get_policy(request.param)
