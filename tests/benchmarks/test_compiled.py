"""The figures of programs that are compiled for accelerators which need not be there."""

import collections
import dataclasses
import datetime
import functools
import importlib.util
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest

from benchmarks import _compiled, _compiled_steps, _programs, _targets, compiled
from benchmarks._compiled import count_bytes
from benchmarks._optimizer_steps import SCALE, Steps
from benchmarks._optimizer_updates import ADAMW
from benchmarks._programs import Case, Program
from benchmarks._results import ResultTable
from examples.gpt.model import GPTConfig
from jmp_policy import DynamicLossScale, optim, quant

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


def test_a_program_for_this_machine_has_figures_and_products():
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    program = Program(jax.jit(lambda x, y: (x + 1.0, x @ y), donate_argnums=0), (x, x))
    executable = _targets.cpu().compile(program)
    measured = _compiled.figures(executable)
    assert measured.flops == pytest.approx(2 * 64**3, rel=0.1)
    assert measured.bytes_accessed >= 4 * 64 * 64 * 4
    assert measured.aliased == 64 * 64 * 4
    assert measured.peak >= 3 * 64 * 64 * 4
    assert _compiled.products(executable) == collections.Counter(f32=1)


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


def _entry(name, calls, error=None):
    def make():
        calls.append(name)
        if error is not None:
            raise error
        return Program(jax.jit(lambda x: x @ x), (jax.ShapeDtypeStruct((8, 8), jnp.float32),))

    return _compiled_steps.Entry(name, make)


@pytest.mark.slow
def test_figures_of_other_sources_are_not_kept(tmp_path, capsys, monkeypatch):
    path, calls = tmp_path / "cpu.json", []
    compiled.Measurements(_targets.cpu(), path).measure(_entry("a", calls))
    monkeypatch.setattr(compiled, "hash_sources", lambda: "changed")
    compiled.Measurements(_targets.cpu(), path).measure(_entry("a", calls))
    assert calls == ["a", "a"]
    assert "has tables of other sources or versions, whose programs are not used" in capsys.readouterr().out


def test_a_table_that_is_made_anew_leaves_those_of_other_runs(tmp_path, monkeypatch):
    path = tmp_path / "cpu.json"
    first, second = (ResultTable(name, name, ("of",), (("1",),)) for name in ("zero_cost", "optimizer"))
    for made in (first, second):
        compiled.Measurements(_targets.cpu(), path).keep(made)
    monkeypatch.setattr(compiled, "hash_sources", lambda: "changed")
    anew = dataclasses.replace(first, rows=(("2",),))
    compiled.Measurements(_targets.cpu(), path).keep(anew)
    assert compiled.read_tables(path) == (second, anew)
    compiled.Measurements(_targets.cpu(), path).keep(second)
    assert len(json.loads(path.read_text(encoding="utf-8"))["runs"]) == 1


def test_a_file_keeps_the_tables_that_are_complete_with_their_date_and_versions(tmp_path):
    path = tmp_path / "results" / "cpu.json"
    kept = [ResultTable(name, name, ("of",), ((name,),)) for name in ("optimizer", "zero_cost")]
    compiled.Measurements(_targets.cpu(), path).keep(kept[0])
    compiled.Measurements(_targets.cpu(), path).keep(kept[1])
    assert compiled.read_tables(path) == (kept[1], kept[0])
    (written,) = json.loads(path.read_text(encoding="utf-8"))["runs"]
    assert datetime.date.fromisoformat(written["date"])
    assert {"target": "CPU", "jax": jax.__version__}.items() <= written["origin"].items()


@pytest.mark.slow
@pytest.mark.parametrize("target", ["tpu", "gpu"])
def test_the_figures_that_are_kept_are_of_tables_that_there_are(target):
    path = pathlib.Path(compiled.__file__).with_name("results") / f"compiled-{target}.json"
    tables = compiled.read_tables(path)
    assert {table.name for table in tables} >= {"zero_cost", "int8"}
    for table in tables:
        assert (table.title, table.header[: len(compiled.TABLES[table.name].labels)]) == (
            compiled.TABLES[table.name].title,
            compiled.TABLES[table.name].labels,
        )
        assert len(table.rows) == len(list(compiled.TABLES[table.name].rows()))


def test_tables_have_ratios_or_multiples_and_say_what_is_not_installed(monkeypatch):
    measurements = compiled.Measurements(_targets.cpu())
    figures = _compiled.Figures(1.0, 200.0, 30.0, 40.0, 50.0)
    monkeypatch.setattr(measurements, "measure", lambda entry, options: {
        "a": compiled.Measured(figures, {"bf16": 3, "f8e4m3fn": 1}),
        "b": compiled.Measured(_compiled.Figures(1.0, 100.0, 30.0, 80.0, 50.0), {}),
        "c": "not installed",
    }[entry])  # fmt: skip
    rows = [_compiled_steps.Row((name,), name, over="b") for name in ("a", "c")]
    written = compiled.tabulate("", compiled.Table("", ("of",), lambda: iter(rows)), measurements).to_markdown()
    assert "| a | 1.000 | 2.000 | 1.000 | 0.500 | 3 bf16, 1 f8e4m3fn |" in written
    assert "| c | not installed |  |  |  |  |" in written
    rows = [_compiled_steps.Row((name,), name, over="b", unit=10) for name in ("a", "c")]
    written = compiled.tabulate("", compiled.Table("", ("of",), lambda: iter(rows)), measurements).to_markdown()
    assert "| a | 20.00 | 3.00 | 4.00 | 5.00 | +10.00 | 3 bf16, 1 f8e4m3fn |" in written
    assert "| c | not installed |  |  |  |  |  |" in written


@pytest.mark.slow
def test_every_program_of_the_tables_has_one_name():
    for name, made in compiled.TABLES.items():
        rows = list(made.rows())
        assert all(len(row.labels) == len(made.labels) for row in rows), name
        assert len({row.labels for row in rows}) == len(rows), name
        assert len({row.unit is None for row in rows}) == 1, name


def _is_installed(module):
    return importlib.util.find_spec(module) is not None


has_libtpu = pytest.mark.skipif(not _is_installed("libtpu"), reason="libtpu is not installed")
has_cuda = pytest.mark.skipif(
    not (_is_installed("jax_cuda12_plugin") and _is_installed("nvidia")), reason="the wheels of CUDA are not installed"
)
GPT = GPTConfig(width=128, depth=1, heads=2, context=64)


@functools.cache
def _on_tpu(make, case):
    executable = _targets.tpu().compile(make(case))
    return _compiled.figures(executable), _compiled.products(executable)


@has_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("mlp", "linen", "mixed_bfloat16"),
        Case("mlp", "nnx", "mixed_float16"),
        Case("gpt", "nnx", "mixed_bfloat16", GPT),
    ],
    ids=lambda case: f"{case.model}, {case.api}, {case.policy}",
)
class TestOnATPU:
    def test_a_step_costs_what_it_costs_by_hand(self, case):
        ours, by_hand = _on_tpu(_programs.ours, case)[0], _on_tpu(_programs.by_hand, case)[0]
        ratios = ours.over(by_hand)
        assert max(ratios.bytes_accessed, ratios.temporaries, ratios.peak) <= 1.001
        assert ratios.flops <= 1.03  # a select for each number that a `lax.cond` skips

    def test_every_product_is_in_half(self, case):
        dtype = {"mixed_bfloat16": "bf16", "mixed_float16": "f16"}[case.policy]
        assert set(_on_tpu(_programs.ours, case)[1]) == {dtype}

    def test_a_check_adds_a_bounded_number_of_bytes(self, case):
        unit = count_bytes(case.functional(None).params)
        ours, unchecked = (_on_tpu(make, case)[0].per(unit) for make in (_programs.ours, _programs.unchecked))
        most = 1.5 if case.model == "mlp" else 2.5  # by a `lax.cond` the MLP has 2.1
        assert ours.bytes_accessed - unchecked.bytes_accessed <= most
        assert ours.temporaries - unchecked.temporaries <= 1.0


@has_libtpu
@pytest.mark.slow
def test_a_tpu_reads_a_weight_in_squares_as_it_is_stored():
    """Otherwise it writes a scale for each element, 1.23 times the bytes of the matmul by a bfloat16 weight."""
    x, weight = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 4096), (4096, 4096)))
    stored = jax.eval_shape(functools.partial(quant.quantize_array, quantization="e4m3/128"), weight)
    program = Program(jax.jit(lambda x, weight: x @ weight.dequantize()), (x, stored))
    accessed = _compiled.figures(_targets.tpu().compile(program)).bytes_accessed
    assert accessed <= 1.25 * stored.size  # a byte for each element, 4 for a block of inputs of each output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "more_bytes", "more_temporaries"),
    [pytest.param("tpu", 0.7, 0.35, marks=has_libtpu), pytest.param("gpu", 0.55, 0.02, marks=has_cuda)],
)
def test_a_scale_and_a_skip_cost_little_on_an_accelerator(target, more_bytes, more_temporaries):
    """In multiples of 100 million parameters, over the same step without either.

    By hand, a `lax.cond` costs 1.32 and 1.00 on a TPU, and 8.00 and 3.49 on an H100 with jax 0.10.
    """
    steps, target = Steps(10**8), _targets.TARGETS[target]()
    tx = optim.loss_scaled(ADAMW, DynamicLossScale(SCALE))
    plain, stepped, minimized = (
        _compiled.figures(target.compile(program)).per(count_bytes(steps.params))
        for program in (steps.unscaled(), steps.ours(tx, optim.step), steps.minimized(tx))
    )
    for checked in (stepped, minimized):
        assert checked.bytes_accessed - plain.bytes_accessed <= more_bytes
        assert checked.temporaries - plain.temporaries <= more_temporaries
