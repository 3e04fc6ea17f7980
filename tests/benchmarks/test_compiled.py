"""The figures of programs that are compiled for accelerators which need not be there."""

import collections
import importlib.util

import jax
import jax.numpy as jnp
import pytest

from benchmarks import _compiled, _targets
from benchmarks._programs import Program

# Two products of an optimized program for CUDA: of Triton inside of a fusion, and of cuBLAS, with scratch memory.
HLO = """
%gemm_fusion_dot_computation (parameter_0: bf16[8,4], parameter_1: s8[4,2]) -> f32[8,2] {
  %parameter_0 = bf16[8,4]{1,0} parameter(0)
  %parameter_1 = s8[4,2]{1,0} parameter(1)
  ROOT %dot.3 = f32[8,2]{1,0} dot(%parameter_0, %parameter_1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main.2 (a.1: f8e4m3fn[8,4], b.1: f8e4m3fn[4,2]) -> f32[8,2] {
  %a.1 = f8e4m3fn[8,4]{1,0:T(8,128)(4,1)} parameter(0)
  %b.1 = f8e4m3fn[4,2]{1,0} parameter(1)
  %c = f32[] constant(1)
  %other = (f32[8,2]{1,0}, u8[0]{0}) custom-call(%a.1), custom_call_target="somebody's"
  ROOT %cublas-gemm.1 = (f32[8,2]{1,0}, s8[4194304]{0}) custom-call(%a.1, %b.1, %c, %c), \
custom_call_target="__cublas$lt$matmul$f8", backend_config={"gemm_backend_config":{"dot_dimension_numbers":\
{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
}
"""


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_products_are_read_from_fusions_and_from_calls_of_libraries():
    in_triton, in_cublas = _compiled._find_products(HLO)
    assert [operand.dtype for operand in in_triton.operands] == ["bf16", "s8"]
    assert not in_triton.library
    assert in_cublas.library
    assert (in_cublas.result.shape, in_cublas.result.nbytes, in_cublas.contracted) == ((8, 2), 64, 4)
    assert [operand.nbytes for operand in in_cublas.operands] == [32, 8, 4, 4]


@pytest.mark.parametrize(("dtype", "nbytes"), [("bf16", 20), ("s4", 5), ("f8e4m3fn", 10), ("pred", 10)])
def test_arrays_have_the_bytes_of_their_dtypes(dtype, nbytes):
    assert _compiled._Array(dtype, (2, 5)).nbytes == nbytes


def test_a_program_for_this_machine_has_figures_and_products():
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    program = Program(jax.jit(lambda x, y: (x + 1.0, x @ y), donate_argnums=0), (x, x))
    compiled = _targets.cpu().compile(program)
    measured = _compiled.figures(compiled)
    assert measured.flops == pytest.approx(2 * 64**3, rel=0.1)
    assert measured.bytes_accessed >= 4 * 64 * 64 * 4
    assert measured.aliased == 64 * 64 * 4
    assert measured.peak >= 3 * 64 * 64 * 4
    assert _compiled.products(compiled) == collections.Counter(f32=1)


def test_ratios_of_nothing_to_nothing_are_one():
    ratios = _compiled.Figures(2, 0, 3, 1, 4).over(_compiled.Figures(1, 0, 2, 0, 4))
    assert ratios == _compiled.Figures(2.0, 1.0, 1.5, float("inf"), 1.0)


@pytest.mark.parametrize(
    ("target", "module", "install"),
    [
        (_targets.tpu, "libtpu", r"pip install 'jmp-policy\[compiled\]'"),
        (_targets.gpu, "jax_cuda12_plugin", rf"pip install 'jax\[cuda12\]=={jax.__version__}'"),
    ],
)
def test_a_compiler_that_is_missing_is_named(monkeypatch, target, module, install):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=rf"There is no module '{module}': .* Install it: {install}"):
        target.__wrapped__()
