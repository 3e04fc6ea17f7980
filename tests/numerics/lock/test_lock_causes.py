"""Causes and fixes of differences between locks that are written here, row by row."""

import pytest

from jmp_policy.numerics import Lock, LockRow

COUNT = "find the operation that was added, removed, or runs in another dtype"
CAST = "cast the argument back, for example with jmp.cast_floating"
QUANTIZE = "quantize the weights as in the lock, for example with quant.quantize"
POLICY = "change the policy back"
REMAT = "check which functions jax.checkpoint wraps, and its policy"
OTHER = "set compute= of the policy, or the dtype of the layer"
NARROWER = "wrap the code in jmp.force_full_precision, or give its module or scope a float32 rule"
WIDER = "cast the float32 array, parameter or constant that promotes it, or set the dtype of the layer"
GATHER = "cast before the gather; if XLA inserted it, put jax.lax.optimization_barrier after the cast"
SENT = "send the array in the dtype of the lock, and cast it afterwards"


def read(line):
    """The row of a line, which may have no amount."""
    path, fact, what, amount, *_ = (*line.split(" | "), "1 time")
    return LockRow(path.removeprefix("."), fact, what, amount)


def write(lines, policies):
    return Lock(tuple(map(read, lines)), "step", "cuda", policies=tuple(policies.items()))


def explain(old, new, before=(), after=()):
    """The causes and fixes of the differences between lines, by scope and fact. Every scope has another fact."""
    kept = [f"{row.split(' | ')[0]} | forward kept | same" for row in (*old, *new)]
    difference = write([*old, *kept], dict(before)).diff(write([*new, *kept], dict(after)))
    return {f"{row.path} | {row.fact}": (row.cause, row.fix) for row in difference.rows}


WAS, NOW = "params=float32,compute=bfloat16,output=float32", "params=float32,compute=bfloat16,output=bfloat16"
CHANGED = f"the policy is {NOW}, was {WAS}"
POLICIES = {
    "a dtype that came": ("exp in float32", "exp in bfloat16", CHANGED),
    "a dtype that went": ("exp in bfloat16", "exp in float32", f"perhaps {CHANGED}"),
    "a dtype that is part of another": ("exp in float32", "exp in float16", f"perhaps {CHANGED}"),
    "a dtype that stays": ("bfloat16 -> float16", "bfloat16 -> float32", f"perhaps {CHANGED}"),
    "another amount": (
        "exp in bfloat16 | 1; sin in int8 | 1",
        "exp in bfloat16 | 2; sin in int8 | 2",
        f"perhaps {CHANGED}",
    ),
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_is_the_cause_only_of_dtypes_that_came_with_it(name):
    *texts, cause = POLICIES[name]
    old, new = ([f"up | forward operation | {what}" for what in text.split("; ")] for text in texts)
    assert explain(old, new, {".": WAS}, {".": NOW}) == {"up | forward operation": (cause, POLICY)}


def test_a_quantized_policy_is_the_cause_of_quantized_matmuls():
    old, new = ([f"up | forward matmul | {what}"] for what in ("float32 x float32 -> float32", "int8 x int8 -> int32"))
    found = explain(old, new, {"up": WAS}, {"up": f"int8_from_{WAS}"})
    assert found["up | forward matmul"] == (f"the policy of up is int8_from_{WAS}, was {WAS}", POLICY)


def test_of_several_policies_only_that_of_the_scope_may_be_the_cause():
    old, new = ([f"{path} | forward operation | exp | {i}" for path in ("up", "down")] for i in range(2))
    found = explain(old, new, {"up": WAS, "head": WAS}, {"up": NOW, "head": NOW})
    assert found["up | forward operation"] == (f"perhaps the policy of up is {NOW}, was {WAS}", POLICY)
    assert found["down | forward operation"] == ("", COUNT)


def test_a_policy_that_explains_a_row_comes_before_an_argument_that_may():
    old, new = ([f"up | forward operation | exp in {dtype}", f"w | argument | {w}"]
                for dtype, w in (("float32", "float32"), ("bfloat16", "float16")))  # fmt: skip
    assert explain(old, new, {".": WAS}, {".": NOW})["up | forward operation"] == (CHANGED, POLICY)


def test_rows_are_folded_only_with_their_cause():
    rows = lambda *floats: [
        row
        for i in range(4)
        for row in (
            f"blocks/{i} | forward matmul | bfloat16 x bfloat16 -> {'float32' if floats else 'bfloat16'}",
            f"params/blocks/{i}/kernel | argument | {'float32' if i in floats else 'bfloat16'}",
        )
    ]
    argument = "argument params/blocks/{}/kernel is float32, was bfloat16"
    found = explain(rows(), rows(0, 1, 2, 3))
    assert found["blocks/[0-3] | forward matmul"] == (argument.format("[0-3]"), CAST)
    found = explain(rows(), rows(0, 2))
    assert found["blocks/[0,2] | forward matmul"] == (argument.format("[0,2]"), CAST)
    assert found["blocks/[1,3] | forward matmul"] == (f"perhaps {argument.format('0')}", CAST)


def test_renamed_scopes_are_folded_only_if_their_names_differ_in_a_number():
    old, new = ([f"{name} | forward matmul | float32" for name in names.split()] for names in ("b1 b2", "a1 z"))
    locks = write(old, {}), write(new, {})
    causes = {row.path: row.cause for row in locks[0].diff(locks[1]).rows}
    assert causes == {"b1": "it is in a1 now", "b2": "it is in z now", "a1": "it was in b1", "z": "it was in b2"}


@pytest.mark.parametrize("forward", ["exp in float32 | 2 times", "exp in bfloat16"])
def test_other_dtypes_in_the_backward_pass_need_others_in_the_forward_pass(forward):
    old = ["up | forward operation | exp in float32", "up | backward sum | a in float32",
           "up | backward cast | a -> b | 1 element"]  # fmt: skip
    new = [f"up | forward operation | {forward}", "up | backward sum | a in bfloat16",
           "up | backward cast | a -> b | 2 elements"]  # fmt: skip
    found = explain(old, new)
    follows = ("the forward pass of this scope differs", "fix the forward pass of this scope first")
    assert found["up | backward cast"] == follows
    assert found["up | backward sum"] == (("", NARROWER) if "times" in forward else follows)


FIXES = {
    "another operation": ("operation", "exp in float32", "tanh in bfloat16", COUNT),
    "another sum": ("sum", "cumsum in float32", "reduce_sum in bfloat16", COUNT),
    "another half": ("cast", "float32 -> bfloat16; bfloat16 -> float32", "float32 -> float16; float16 -> float32",
                     OTHER),
    "a wider cast": ("cast", "bfloat16 -> float16", "bfloat16 -> float32", WIDER),
    "a narrower cast": ("cast", "float64 -> float32", "float32 -> bfloat16", NARROWER),
    "more casts": ("cast", "", "float32 -> bfloat16; bfloat16 -> float32",
                   "remove the casts down and up again, or see the other differences of this scope"),
    "fewer casts": ("cast", "float32 -> bfloat16", "", "see the other differences of this scope"),
    "a wider gather": ("collective", "all-gather in bfloat16 over data", "all-gather in float32 over data", GATHER),
    "an equal gather": ("collective", "all-gather in bfloat16 over data", "all-gather in float16 over data", SENT),
    "a narrower gather": ("collective", "all-gather in float32 over data", "all-gather in float16 over data", SENT),
    "another gather": ("collective", "", "all-gather in float32 over data", COUNT),
    "a wider shift": ("collective", "collective-permute in float16 over data",
                      "collective-permute in float32 over data", SENT),
    "a wider reduction": ("collective", "all-reduce in bfloat16 over data", "all-reduce in float32 over data",
                          "set reduce= of the policy, or reduce_dtype= of value_and_grad"),
    "a narrower reduction": ("collective", "all-reduce in float32 over data", "all-reduce in float16 over data", SENT),
}  # fmt: skip


@pytest.mark.parametrize("name", FIXES)
def test_a_difference_says_how_to_undo_it(name):
    kind, *texts, fix = FIXES[name]
    rows = ([f"up | forward {kind} | {what}" for what in text.split("; ") if what] for text in texts)
    assert explain(*map(list, rows)) == {f"up | forward {kind}": ("", fix)}


DTYPES = {
    "floats": ("argument | float32", "argument | bfloat16", CAST),
    "float8": ("argument | bfloat16", "argument | float8_e4m3fn", CAST),
    "an integer": ("argument | float32", "argument | int8", QUANTIZE),
    "quantized": ("argument | float32", "argument quantized | float8_e4m3fn of bfloat16", QUANTIZE),
    "no longer quantized": ("argument quantized | int8 of bfloat16", "argument | bfloat16", QUANTIZE),
    "another format": ("argument quantized | int8 of bfloat16", "argument quantized | int4 of bfloat16", QUANTIZE),
}


@pytest.mark.parametrize("name", DTYPES)
def test_only_floating_arguments_are_cast_back(name):
    old, new, fix = DTYPES[name]
    found = explain(
        [f"w/up | {old}", "up | forward sum | a in float32"], [f"w/up | {new}", "up | forward sum | b in int8"]
    )
    assert {each for _, each in found.values()} == {fix}


def state(dtype, *more):
    names = [f"{path}/dense" for path in ("state/opt/0/mu", "state/opt/0/nu", "state/params")]
    return [*(f"{name} | argument | {dtype}" for name in names), *more]


def test_an_argument_that_is_returned_is_the_cause_of_the_result():
    for place in ("result", "result/0", "result/state", "result/0/state"):
        names = [f"{place}/{end}/dense" for end in ("opt/0/mu", "params")]
        old, new = (state(dtype, *(f"{name} | result | {dtype}" for name in names)) for dtype in ("float32", "float16"))
        found = explain(old, new)
        for name, end in zip(names, ("opt/0/mu", "params"), strict=True):
            assert found[f"{name} | result"] == (f"argument state/{end}/dense is float16, was float32", CAST)


@pytest.mark.parametrize("result", ["result/0", "result/dense"])
def test_an_argument_of_another_name_is_perhaps_the_cause_of_a_result(result):
    old, new = ([f"params/0 | argument | {dtype}", f"{result} | result | {dtype}"] for dtype in ("float32", "float16"))
    assert explain(old, new)[f"{result} | result"] == ("perhaps argument params/0 is float16, was float32", CAST)


@pytest.mark.parametrize("scope", [".", "dense", "other"])
def test_the_argument_with_the_shortest_path_is_perhaps_the_cause(scope):
    old, new = (state(dtype, f"{scope} | forward operation | sqrt in {dtype}") for dtype in ("float32", "bfloat16"))
    cause = "perhaps argument state/params/dense is bfloat16, was float32"
    assert explain(old, new)[f"{scope} | forward operation"] == (cause, CAST)


def test_more_or_less_forward_work_is_perhaps_recomputed():
    kept = ["up | forward operation | exp in float32", "up | forward cast | a -> b | 1 element"]
    saved = ["up | forward operation | exp in float32 | 2 times", "up | forward cast | a -> b | 2 elements",
             "up | forward matmul | float32"]  # fmt: skip
    again = [*kept, "up | recomputed matmul | float32"]
    for old, new, text in ((saved, again, "more"), (again, saved, "less")):
        found = explain(old, new)
        assert found.pop("up | recomputed matmul") == (f"{text} is recomputed in the backward pass", REMAT)
        assert set(found) == {"up | forward operation", "up | forward cast", "up | forward matmul"}
        assert set(found.values()) == {(f"perhaps {text} is recomputed in the backward pass", REMAT)}


def test_another_dtype_inside_of_a_remat_is_no_change_of_the_remat():
    old = ["up | forward matmul | float32 x float32", "up | forward arithmetic | in bfloat16"]
    new = ["up | forward matmul | bfloat16 x bfloat16", "up | forward arithmetic | in bfloat16",
           "up | recomputed arithmetic | in bfloat16", "up | forward cast | a -> b"]  # fmt: skip
    found = explain(old, new)
    assert found["up | recomputed arithmetic"][0] == "the forward pass of this scope differs"
    assert found["up | forward cast"][0] == ""
