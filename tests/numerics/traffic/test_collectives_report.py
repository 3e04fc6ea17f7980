"""The report of collectives: what it selects, sums and asserts, and what is refused."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P
from meshes import make_mesh
from properties import examples

from jmp_policy.numerics import Collective, Collectives, collectives

# XLA writes many forms of groups and lines, of which the compilers that are here write one each.
from jmp_policy.numerics._hlo import find_group, parse_module, partition


def make_row(kind="all-reduce", dtype="bfloat16", axes=("data",), *, gradient=True, **fields):
    reduction = "sum" if kind in ("all-reduce", "reduce-scatter") else ""
    return Collective(kind, reduction, dtype, axes, 4, (4, 2), **{
        "direction": "backward" if gradient else "forward", "is_gradient": gradient, "inserted": True,
        "source": "train.py:12 (loss)", "path": "head", "count": 2, "bytes": 32,
    } | fields)  # fmt: skip


REPORT = Collectives(
    (
        make_row(),
        make_row(dtype="float32", bytes=64),
        make_row(axes=("data", "model"), gradient=False, bytes=8),
        make_row("all-gather", gradient=False, count=1, bytes=16),
        make_row("all-gather", "int32", gradient=False, count=1, bytes=4),
    ),
    8,
    ("data", "model"),
    compiled=True,
)


def test_rows_are_selected():
    assert REPORT.select().rows == REPORT.rows
    assert REPORT.select(kind="all-gather", dtype="bf16").rows == REPORT.rows[3:4]
    assert REPORT.select(dtype="int32").rows == REPORT.rows[4:]
    assert REPORT.select(axis="model").rows == REPORT.rows[2:3]
    assert REPORT.select(direction="backward").rows == REPORT.select(gradients=True).rows == REPORT.rows[:2]


def test_sums_are_of_what_is_selected():
    assert (REPORT.total_count(), REPORT.total_bytes(), REPORT.total_moved_bytes()) == (8, 124, 171)
    assert REPORT.total_bytes(dtype="bfloat16", kind="all-reduce") == 40
    assert REPORT.total_moved_bytes(kind="all-gather") == 12 + 3


def test_assertions_of_a_report_name_the_lines_that_they_fail_for():
    REPORT.assert_reduced_in("bfloat16", of="activations")
    REPORT.assert_gathered_in("bfloat16", axis="data")  # without those of integers
    REPORT.assert_no(kind="all-to-all")
    for check, message in [
        (lambda: REPORT.assert_reduced_in("float32"),
         r"2 of 4 reductions of gradients are not in float32:\n"
         r"  train.py:12 \(loss\): backward all-reduce in head of bfloat16\[4,2\] over data, 2 times$"),
        (lambda: REPORT.assert_reduced_in("float32", of="all"), "4 of 6 reductions are not in float32:"),
        (lambda: REPORT.assert_reduced_in("float32", axis="model"),
         "Found no reductions of gradients over model, in float32 or any"),
        (lambda: REPORT.assert_gathered_in("float32", axis="data"), "1 of 1 all-gathers over data are not in float32:"),
        (lambda: REPORT.select(kind="all-reduce").assert_gathered_in("bf16"),
         r"Found no all-gathers, in bfloat16 or any other floating dtype\. XLA"),
        (lambda: REPORT.assert_no(kind="all-gather", dtype="int32"),
         r"1 collectives:\n  train\.py:12 \(loss\): forward all-gather in head"),
    ]:  # fmt: skip
        with pytest.raises(AssertionError, match=f"^{message}"):
            check()


def test_a_gather_in_another_dtype_says_where_the_barrier_goes():
    gather = make_row("all-gather", "float32", source="net.py:7 (rope)")
    moved = dataclasses.replace(REPORT, rows=(dataclasses.replace(gather, inserted=True),))
    with pytest.raises(AssertionError) as error:
        moved.assert_gathered_in("bfloat16")
    assert str(error.value).splitlines()[-1] == (
        "If the code casts to bfloat16, XLA has moved the gather before the cast, to the array of net.py:7. Put a "
        "barrier right after the cast, before the result is used or its sharding is constrained (jax issue 23543). For "
        "example: x = jax.lax.optimization_barrier(x.astype('bfloat16'))."
    )
    explicit = dataclasses.replace(REPORT, rows=(dataclasses.replace(gather, inserted=False),))
    with pytest.raises(
        AssertionError, match=r"\nCast before the gather, or pass a policy\. For example: sharding\.all_"
    ):
        explicit.assert_gathered_in("bfloat16")


@pytest.mark.cpu("XLA for a GPU may gather otherwise")
def test_the_barrier_of_the_message_keeps_the_dtype_of_a_gather():
    mesh = make_mesh((2,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
    whole, x = NamedSharding(mesh, P()), jnp.ones((4, 4), jnp.bfloat16, device=NamedSharding(mesh, P("seq")))

    def rotate(x, *, barrier):
        wide = x.astype(jnp.float32)
        x = (wide * jnp.cos(wide)).astype(jnp.bfloat16)
        return lax.with_sharding_constraint(lax.optimization_barrier(x) if barrier else x, whole) @ x.T

    collectives(functools.partial(rotate, barrier=True))(x).assert_gathered_in("bfloat16")
    with pytest.raises(AssertionError, match=r"has moved the gather before the cast, to the array of .*report\.py:\d+"):
        collectives(functools.partial(rotate, barrier=False))(x).assert_gathered_in("bfloat16")


ABSTRACT = AbstractMesh((512, 8), ("data", "model"))
SHARDED = jax.ShapeDtypeStruct((512, 4), jnp.float32, sharding=NamedSharding(ABSTRACT, P("data")))
DESCRIBED = r"the AbstractMesh of data=512, model=8 \(4096 devices; \d+ are here\)"


@pytest.mark.parametrize(("error", "call", "message"), [
    (ValueError, lambda: REPORT.select(kind="allreduce"),
     r"Unknown kind 'allreduce'\. Did you mean 'all-reduce'\? For example: report\.select\("),
    (ValueError, lambda: REPORT.select(direction="back"), r"Unknown direction 'back'\. "),
    (ValueError, lambda: REPORT.select(axis="fsdp"),
     r"No mesh of the program has an axis 'fsdp'\. Its axes are 'data', 'model'\."),
    (ValueError, lambda: REPORT.select(dtype="bflaot16"), "Unknown dtype 'bflaot16'"),
    (ValueError, lambda: collectives(jnp.sin)(1.0).select(axis="data"),
     r".*an axis 'data'\. It runs on one device, without a mesh"),
    (ValueError, lambda: REPORT.assert_reduced_in("float32", of="gradient"),
     r"Unknown of 'gradient'\. Did you mean 'gradients'\? For example: report\.as"),
    (TypeError, lambda: collectives(3), r"collectives takes a function, got 3\. For example: collectives\(train_step"),
    (TypeError, lambda: collectives(jnp.sin, compiled="yes"),
     r"compiled is True, False or None, got 'yes'\. For example: compiled=False"),
    (ValueError, lambda: collectives(jnp.sum)(SHARDED),
     f"The program has no explicit coll.* which {DESCRIBED} does not hav"),
    (ValueError, lambda: collectives(jnp.sum, compiled=True)(SHARDED),
     f"compiled=True needs devices, but {DESCRIBED} has none"),
])  # fmt: skip
def test_bad_input_is_an_error(error, call, message):
    with pytest.raises(error, match=f"^{message}"):
        call()


def test_the_report_is_plain_data():
    plain = REPORT.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert (plain["count"], plain["bytes"], plain["rows"][2]["axes"]) == (8, 124, ["data", "model"])


def test_a_table_shows_the_rows_of_most_bytes():
    rows = tuple(make_row(source=f"train.py:{line} (loss)", bytes=line) for line in range(1, 101))
    text = str(Collectives(rows, 4, ("data",), compiled=True))
    assert collectives(jnp.sum, compiled=False)(SHARDED).rows == ()
    assert "60 rows with fewer bytes are left out: `.rows` has them." in text
    assert "train.py:61" in text
    assert "train.py:60" not in text


def test_a_compiler_that_writes_nothing_down_is_an_error():
    class Silent:
        def compile(self, compiler_options):
            assert "xla_dump_to" in compiler_options

    with pytest.raises(RuntimeError, match=r"^The compiler did not write the program .* collectives\(fun, compiled="):
        partition(Silent())  # pyright: ignore[reportArgumentType]


SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@examples(40)
@given(SIZES, st.data())
def test_axes_are_found_from_groups_of_devices(sizes, data):
    names = [f"axis{i}" for i in range(len(sizes))]
    chosen = data.draw(st.sets(st.sampled_from([i for i, size in enumerate(sizes) if size > 1] or [0])))
    others = [i for i in range(len(sizes)) if i not in chosen]
    numbers = np.arange(np.prod(sizes)).reshape(sizes)
    count = int(np.prod([sizes[i] for i in chosen]))
    groups = numbers.transpose(others + sorted(chosen)).reshape(-1, count)
    lists = ",".join("{" + ",".join(map(str, group)) + "}" for group in data.draw(st.permutations(groups.tolist())))
    axes = tuple(names[i] for i in sorted(chosen) if sizes[i] > 1)
    mesh = dict(zip(names, sizes, strict=True))
    assert find_group(f"replica_groups={{{lists}}}", [mesh], numbers.size) == (axes, count)
    # The two short forms of XLA: numbers that are transposed, and a mesh of its own.
    order = others + sorted(chosen)
    iota = f"[{numbers.size // count},{count}]<=[{','.join(map(str, sizes))}]T({','.join(map(str, order))})"
    assert find_group(f"replica_groups={iota}", [mesh], numbers.size) == (axes, count)
    own = ",".join(f"'{name}'={size}" for name, size in mesh.items())
    along = ",".join(f"'{names[i]}'" for i in sorted(chosen))
    assert find_group(f"replica_groups=mesh[{own}] {{{along}}}, x={{}}", [mesh], numbers.size) == (axes, count)


def test_groups_are_read_off_a_mesh_of_xlas_own_with_its_devices_in_another_order():
    mesh = {"data": 2, "fsdp": 4}
    for devices in ("([2,4]T(1,0))", "([8]<=[2,4]T(1,0))", "(0,4,1,5,2,6,3,7)"):
        groups = f"replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids={devices} "
        assert find_group(groups + "{'axis_0'}", [mesh], 8) == (("fsdp",), 4)
        assert find_group(groups + "{'axis_2'}", [mesh], 8) == (("data",), 2)


def test_groups_that_lie_along_no_axis_have_none():
    assert find_group("replica_groups={{0,3},{1,2}}", [{"data": 2, "model": 2}], 4) == ((), 2)
    assert find_group("replica_groups={}", [{"data": 2, "model": 2}], 4) == (("data", "model"), 4)
    assert find_group("replica_groups=mesh['a'=4] {'a':(1)2}", [{"data": 2, "model": 2}], 4) == (("data",), 2)
    assert find_group("source_target_pairs={{0,9}}", [{"data": 2}], 10) == ((), 2)


HLO = """HloModule jit_f

FileNames
1 "/home/me/train.py"
2 "/usr/lib/python3/site-packages/library.py"

FunctionNames
1 "main"
2 "helper"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}
2 {file_name_id=2 function_name_id=2 line=9 end_line=9 column=1 end_column=2}

StackFrames
1 {file_location_id=1NONE}
2 {file_location_id=2 parent_frame_id=PARENT}

ENTRY %main.1_spmd (x: (f32[2,3], /*index=1*/f8e4m3fn[4])) -> pred[] {
  %x = (f32[2,3]{1,0:T(8,128)}, /*index=1*/f8e4m3fn[4]{0}) parameter(0)
  %y = u8[3]{0} custom-call(%x#1, %x), custom_call_target="a(b", metadata={op_name="jit(f)/a/y" stack_frame_id=2}
  ROOT %z = pred[] constant(false)
}
"""


@pytest.mark.parametrize(("none", "parent"), [("", "1"), (" parent_frame_id=1", "2")])
def test_a_program_is_read_with_its_lines(none, parent):
    module = parse_module(HLO.replace("NONE", none).replace("PARENT", parent))
    body = module.computations[module.entry]
    assert [(array.dtype, array.bits, array.shape) for array in module.instructions["x"].arrays] == [
        ("float32", 32, (2, 3)),
        ("float8_e4m3fn", 8, (4,)),
    ]
    y = module.instructions["y"]
    assert (y.operands, y.op_name, y.arrays[0].dtype) == ((("x", 1), ("x", None)), "jit(f)/a/y", "uint8")
    assert [frame.line_num for frame in module.frames[y.frame]] == [9, 7]
    assert (body.root, body.parameters, module.instructions["z"].arrays[0].dtype) == ("z", {0: "x"}, "bool")


def test_a_file_of_windows_or_beyond_ascii_has_its_name():
    module = parse_module(HLO.replace("/home/me/train.py", r"D:\\me\\b\303\274cher\\train.py").replace("NONE", ""))
    assert module.frames[1][0].file_name == "D:\\me\\bücher\\train.py"
