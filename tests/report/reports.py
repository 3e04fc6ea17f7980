"""Reports of every kind, with the long names of real models."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

import jmp_policy as jmp

# Functions that return these reports would have to trace and run a model for each row.
from jmp_policy.cli._doctor import MATMULS, Diagnosis, Machine, MatmulRate, Speedup, StepTime
from jmp_policy.contrib import Divergence, Parity, diverge, parity
from jmp_policy.numerics import (
    AuditReport,
    AuditRow,
    Collective,
    Collectives,
    Finding,
    Matmul,
    Prediction,
    Reason,
    Stats,
)
from jmp_policy.numerics._explanation import Explanation, ModuleRow
from jmp_policy.numerics._stats_measure import StatsSpec
from jmp_policy.numerics._stats_record import Record
from jmp_policy.numerics._stats_row import StatsLayout, TensorInfo
from jmp_policy.optim import MomentRow, StateReport
from jmp_policy.quant import Comparison, LayerComparison
from jmp_policy.report import Report, Table

FLOAT8 = jmp.get_policy("float8(min_size=0)_from_params=float32,compute=bfloat16,output=float32")
MIXED = jmp.get_policy("mixed_bfloat16")
RULE = "encoder/layers_[0-9]+/self_attention/(query|key|value|out)"
LAYERS = ("self_attention/query", "self_attention/key", "self_attention/relative_position_bias/rel_embedding", "mlp/wi")
PATHS = [f"encoder/layers_{index}/{layer}" for index, layer in itertools.product((0, 11), LAYERS)]
SOURCE = "/home/someone/projects/translation/training/transformer_layers.py:1234 (compute_attention_scores)"
LEFT = "left: the sizes of its product (77, 64 and 1000) are not multiples of 16"


@dataclasses.dataclass(frozen=True)
class Drawn(Report):
    """Any tables and notes."""

    tables: list[Table]
    notes: list[str] = dataclasses.field(default_factory=list)

    def _summarize(self) -> str:
        return f"{len(self.tables)} tables"

    def _list_tables(self, width: int | None) -> list[Table]:
        return self.tables

    def _list_notes(self) -> list[str]:
        return self.notes

    def __repr__(self) -> str:  # not that of a dataclass
        return Report.__repr__(self)


def _explain_module(path: str) -> ModuleRow:
    is_attention = "attention" in path
    type = "MultiHeadDotProductAttention" if path.endswith("self_attention") else "DenseGeneral"
    policy, rule = (FLOAT8, RULE) if is_attention else (MIXED, "its own policy")
    if "/" not in path:
        return ModuleRow(path, "Encoder", MIXED, "default", (), ("int32", "bool"), (), ("bfloat16",), 0, 0, ())
    return ModuleRow(
        path, type, policy, rule, ("float32",), ("bfloat16", "int32", "bool"), ("bfloat16", "float8_e4m3fn"),
        ("float32",), 1_048_576, 1_048_576, ("", "encoder/layers_0") if path.endswith("query") else (),
        "float8(min_size=0)" if is_attention else LEFT,
        ("reduce_window_sum of 4096 numbers in bfloat16",) if path.endswith("wi") else (),
    )  # fmt: skip


def _explain() -> Explanation:
    around = ["", "encoder", "encoder/layers_0", "encoder/layers_0/self_attention"]
    unused = f"policy rule {RULE.replace('encoder', 'decoder')!r} matches no module"
    return Explanation(tuple(map(_explain_module, [*around, *PATHS])), (unused,))


def _audit() -> AuditReport:
    operations = ("dynamic_update_slice", "conv_general_dilated", "reduce_window_sum", "convert_element_type")
    dtypes = ("float32->float8_e4m3fn", "bfloat16", "float32", "float8_e5m2")
    rows = [
        AuditRow(path, operation, dtype, path in PATHS[:3], 96, 7_200_000_000_000, 280_000_000_000)
        for path in ("", *PATHS)
        for operation, dtype in zip(operations, dtypes, strict=True)
    ]
    findings = [
        Finding("float16-softmax", "a softmax in float16: small probabilities become zero", SOURCE, path, ("float16",),
                backward=True, count=3)
        for path in PATHS[:2]
    ]  # fmt: skip
    matmuls = [Matmul("dot_general", (dtype,), dtype, SOURCE, PATHS[0], False, 96, 10**12) for dtype in dtypes[1:]]
    return AuditReport(tuple(rows), tuple(findings), tuple(matmuls), (SOURCE,))


def _communicate() -> Collectives:
    kinds = [("collective-permute", "", "recomputed"), ("reduce-scatter", "sum", "backward"),
             ("all-reduce", "max", "forward")]  # fmt: skip
    rows = [
        Collective(kind, reduction, "float8_e4m3fn", ("replica", "data", "fsdp"), 4096, (16_384, 53_248), direction,
                   direction == "backward", True, SOURCE, path, 96, 280_000_000_000)
        for path in ("", *PATHS)
        for kind, reduction, direction in kinds
    ]  # fmt: skip
    return Collectives(tuple(rows), 4096, ("replica", "data", "fsdp"), compiled=True, uncounted_loops=(SOURCE,))


def _compare() -> Comparison:
    formats = ("int8(activations=false,min_size=0)", "int4/128(min_size=0,table_bits=4)", LEFT)
    rows = [
        LayerComparison(path, "DenseGeneral", format, 4_194_304, 1_048_576, 0.0123, 0.0456)
        for path, format in zip(PATHS, itertools.cycle(formats))
    ]
    return Comparison(tuple(rows), 0.0789)


def _measure() -> Stats:
    formats = ("float16", "float8_e4m3fn", "float8_e5m2", "int8/64")
    turns = {PATHS[1]: (0, 1, 2), PATHS[2]: ((0, 1), (1, 3))}
    sites = [
        TensorInfo(path, "conv_general_dilated", f"/home/someone/projects/transformer_layers.py:{line}", "attend",
             "backward" if line % 2 else "forward", turn, "float32", 4096, (64, 64))
        for line, path in enumerate(["", *PATHS])
        for turn in turns.get(path, (None,))
    ]  # fmt: skip
    counts = np.zeros((len(sites), 2, 4 + 3 * len(formats) + 64), np.uint32)
    counts[:-1, 0, 0] = 1
    counts[2, 0, 2:4] = 7, 100
    counts[:-1, 0, 4:10] = np.arange(len(sites) - 1)[:, None] * [4, 70, 9, 500, 3, 44]
    counts[:-1, 0, -40:-30] = 409
    sums = np.full((len(sites), 1 + 2 * len(formats), 2), 0.003, np.float32)
    extremes = np.tile(np.float32([0.0123, 1.1e-9]), (len(sites), 1))
    record = Record(counts, extremes, np.full(len(sites), -7, np.int32), sums)  # pyright: ignore[reportArgumentType]
    return Stats(record, StatsLayout(sites, StatsSpec(formats)))


def _store() -> StateReport:
    coded = (8, "uint8", (32, 8), 1_064_960, 4_194_304)
    left = (32, "float32", (), 4_194_304, 4_194_304, "no blocks of 256 divide its axes")
    rows = [
        MomentRow(f"{path}/kernel", role, *how)
        for path, how in zip(PATHS, itertools.cycle((coded, left)))
        for role in ("mu", "nu")
    ]
    return StateReport(tuple(rows), 4, 1_048_576 * len(PATHS))


def _predict() -> Prediction:
    faults = [("overflow", 0.03, 1.2e6, 65504.0), ("underflow", 0.5, 1e-9, 6e-8), ("precision", 0.01, 3.0, 0.004)]
    reasons = [
        Reason(path, direction, what, "float16", share, amax, limit, "conv_general_dilated", what == "underflow",
               "/home/someone/projects/transformer_layers.py:1234", cure, 0.5)
        for path in PATHS
        for direction, cure in (("recomputed", "float32"), ("backward", "loss_scale"))
        for what, share, amax, limit in faults
    ]  # fmt: skip
    policy_map = jmp.PolicyMap(dict.fromkeys(PATHS, "float32"), default="mixed_float16")
    risks = dict.fromkeys(PATHS, 0.5)
    return Prediction(tuple(reasons), policy_map, 2.0**12, policy_map, 2.0**24, "with_policy", risks, ("A note.",))


def _diagnose() -> Diagnosis:
    machine = Machine("cpu", "AMD EPYC 9B14", "Linux x86_64, 2 cores", {"jax": "0.10.2", "jaxlib": "0.10.2"})
    rates = [MatmulRate(name, dtype, "float32", 0.125, 1.25) for name, (dtype, *_) in MATMULS.items()]
    rates[-1] = MatmulRate("int8", "int8")
    steps = {"float32": StepTime(0.02, Speedup(1.0, 1.0, 1.0), {"float32": 5})}
    steps |= {"bfloat16": StepTime(0.025, Speedup(0.8, 0.6, 1.0), {"bfloat16": 3, "float32": 2})}
    sizes, advice = {"matrix": 1024, "rows": 512, "width": 256}, ("float32", "half precision is slower here")
    return Diagnosis(machine, sizes, rates, steps, *advice)


def _compare_runs() -> Divergence:
    def model(x: jax.Array, dtype: str) -> jax.Array:
        for path in PATHS:
            with jax.named_scope(path):
                x = jnp.tanh(x.astype(dtype)).astype(jnp.float32)
        return x

    half = lambda x: model(x, "bfloat16")[:2]  # its output is not aligned
    return diverge(lambda x: model(x, "float32"), half)(jnp.linspace(-1, 1, 4))


def _compare_sampler() -> Parity:
    def model(tokens: jax.Array, dtype: str) -> jax.Array:
        x = jax.nn.one_hot(tokens, 5)
        for path in PATHS:
            with jax.named_scope(path):
                x = jnp.tanh(x.astype(dtype)).astype(jnp.float32)
        return x

    def sampler(params: None, tokens: jax.Array) -> jax.Array:
        logits = model(tokens, "bfloat16")
        with jax.named_scope("only_in_the_sampler"):
            return 1.25 * logits

    return parity(lambda params, tokens: model(tokens, "float32"), sampler)(None, jnp.array([[0, 1, 2], [3, 4, 0]]))


REPORTS = {
    "explanation": _explain(), "audit": _audit(), "comparison": _compare(), "statistics": _measure(),
    "prediction": _predict(), "collectives": _communicate(), "state": _store(),
    "diagnosis": _diagnose(), "divergence": _compare_runs(),
    "parity": _compare_sampler(),
}  # fmt: skip
"""By name; each holds every kind of row and note that its class has."""

NAMES = dict.fromkeys(REPORTS, PATHS) | {
    "prediction": PATHS[:2],
    "explanation": PATHS[1:],
    "state": [f"{path}/kernel" for path in PATHS],
    "diagnosis": ["float8_e4m3fn"],
    "statistics": PATHS[:-1],
    "parity": PATHS[1:],
}
"""The names in the first columns that must be whole in the text of each."""
