"""The precision of matmuls: as written, as platforms multiply, and asserted."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from planted import bf16, f32

import jmp_policy as jmp
from jmp_policy.numerics import audit

X = f32(4, 4)
WRITTEN = {None: None, "default": None, "high": "HIGH", "highest": "HIGHEST", "TF32_TF32_F32": "TF32_TF32_F32",
           ("highest", "default"): "HIGHEST, DEFAULT"}  # fmt: skip


def multiply(precision, *, dtype=f32):
    [matmul] = audit(lambda x: lax.dot(x, x, precision=precision))(dtype(4, 4)).matmuls
    return matmul


@pytest.mark.parametrize("given", WRITTEN)
def test_a_matmul_has_the_precision_that_was_written(given):
    assert multiply(given).precision == WRITTEN[given]


@pytest.mark.usefixtures("no_default_precision")
def test_settings_of_jax_and_policies_are_written_precisions():
    with jax.default_matmul_precision("highest"):
        assert multiply(None).precision == "HIGHEST"
    policy = "params=float32,compute=float32,output=float32,precision=high"
    [matmul] = audit(jmp.with_policy(jnp.dot, policy))(X, X).matmuls
    assert matmul.precision == "HIGH"
    [matmul] = audit(lambda x: lax.conv(x[None, None], x[None, None], (1, 1), "SAME", precision="highest"))(X).matmuls
    assert (matmul.operation, matmul.precision) == ("conv_general_dilated", "HIGHEST")


EFFECTIVE = {
    None: ("float32", "bfloat16", "TF32"),
    "high": ("float32", "bfloat16 in 3 passes", "TF32"),
    "highest": ("float32", "bfloat16 in 6 passes", "float32"),
    "BF16_BF16_F32": ("bfloat16",) * 3,
    "BF16_BF16_F32_X9": ("bfloat16 in 9 passes",) * 3,
    "TF32_TF32_F32": ("TF32",) * 3,
    "TF32_TF32_F32_X3": ("TF32 in 3 passes",) * 3,
    "F32_F32_F32": ("float32",) * 3,
}


@pytest.mark.parametrize("precision", EFFECTIVE)
def test_float32_is_multiplied_in_what_the_platform_has(precision):
    matmul = multiply(precision)
    assert tuple(map(matmul.effective, ("cpu", "tpu", "cuda"))) == EFFECTIVE[precision]
    assert matmul.effective("gpu") == matmul.effective("cuda")


def test_a_pair_of_precisions_is_as_exact_as_its_least():
    assert [multiply(("highest", "default")).effective(platform) for platform in ("tpu", "cuda")] == [
        "bfloat16",
        "TF32",
    ]


def test_half_precision_and_integers_are_multiplied_as_they_are():
    assert multiply("highest", dtype=bf16).effective("tpu") == "bfloat16"
    [matmul] = audit(lambda x: lax.dot(x, x, preferred_element_type=jnp.int32))(
        jax.ShapeDtypeStruct((4, 4), jnp.int8)
    ).matmuls
    assert matmul.effective("cuda") == "int8"


def test_the_table_has_a_row_for_each_precision():
    text = str(audit(lambda x: x @ x + jnp.dot(x, x, precision="highest"))(X))
    assert [line.split("  ")[0] for line in text.splitlines()[2:4]] == ["float32", "float32 HIGHEST"]


def mixed(w, x):
    with jax.named_scope("body"):
        x = jnp.dot(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)).astype(jnp.float32)
    with jax.named_scope("head"):
        return jnp.dot(x, w) + jnp.dot(x, w, precision="highest")


def test_float32_that_is_multiplied_in_less_is_found_on_request():
    report = audit(mixed)(X, X)
    report.assert_matmuls_in("float32", path="head")
    report.assert_matmuls_in("float32", exactly=True, platform="cpu", path="head")
    report.assert_matmuls_in("bfloat16", exactly=True, platform="tpu", path="body")
    for platform, text in (("tpu", "bfloat16"), ("cuda", "TF32")):
        with pytest.raises(AssertionError) as error:
            report.assert_matmuls_in("float32", exactly=True, platform=platform, path="head")
        first, line, fix = str(error.value).splitlines()
        assert first == f"1 of 2 matmuls in head are not exactly in float32 on {platform}:"
        assert line.endswith(f"(mixed): dot_general in head reads float32, multiplied in {text}")
        assert fix.startswith("Set precision=highest in the policy of these layers,")


@pytest.mark.parametrize(("given", "message"), [
    ({"exactly": True}, r"exactly=True with platform=None: each needs the other\. For example: report\.assert_m"),
    ({"platform": "tpu"}, "exactly=False with platform='tpu': each needs the other"),
    ({"exactly": True, "platform": "cude"}, r"Unknown platform 'cude'\. Did you mean 'cuda'\? For example: 'tpu'\."),
    ({"path": "*head"}, r"The key '\*head', path= of assert_matmuls_in, is not a valid pattern"),
])  # fmt: skip
def test_a_request_that_says_too_little_is_refused(given, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        audit(mixed)(X, X).assert_matmuls_in("float32", **given)


def test_a_path_without_matmuls_fails():
    with pytest.raises(AssertionError, match="neither a matmul nor a convolution in tail, in float32 or another dtype"):
        audit(mixed)(X, X).assert_matmuls_in("float32", path="tail")
