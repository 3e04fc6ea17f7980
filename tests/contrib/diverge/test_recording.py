"""`contrib.record`, and `contrib.diverge` with a recording: errors are compared with NumPy on the recorded values."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax

from jmp_policy.contrib import diverge, record

RNG = np.random.default_rng(0)
W, X = (jnp.asarray(RNG.normal(size=(8, 8)), jnp.float32) for _ in range(2))


def model(w, x, shift=0.0):
    with jax.named_scope("net"):
        with jax.named_scope("first"):
            x = jnp.tanh(x @ w) + shift
        x = 2 * x
        with jax.named_scope("second"):
            return jnp.sin(x @ w)


def shifted(w, x):
    return model(w, x, 0.1)


def scanned(w, x, shift=0.0):
    def iterate(x, bias):
        with jax.named_scope("first"):
            x = jnp.tanh(x @ w) + bias
        with jax.named_scope("second"):
            return jnp.sin(x @ w) + shift, None

    with jax.named_scope("loop"):
        return lax.scan(jax.checkpoint(iterate), x, jnp.arange(3.0))[0]


def relative(reference, value):
    reference, value = (np.asarray(x, np.float64) for x in (reference, value))
    return float(np.linalg.norm(value - reference) / np.linalg.norm(reference))


@pytest.fixture(scope="module")
def recording():
    return record(model)(W, X)


@pytest.mark.slow
def test_errors_are_those_against_the_recorded_values(recording):
    assert list(recording) == ["net/first", "net/second", "net", "result"]
    divergence = diverge(shifted, recording)(W, X)
    first, second, net = divergence.rows()
    assert [row.path for row in (first, second, net)] == ["net/first", "net/second", "net"]
    passed = jnp.tanh(X @ W)
    made, shifted_made = jnp.sin(2 * passed @ W), jnp.sin(2 * (passed + 0.1) @ W)
    expected = relative(passed, passed + 0.1)
    np.testing.assert_allclose((first.introduced, first.outgoing), expected, rtol=1e-5)
    assert (first.incoming, second.introduced, net.introduced) == (0, 0, 0)
    np.testing.assert_allclose(second.incoming, expected, rtol=1e-5)
    np.testing.assert_allclose(second.outgoing, relative(made, shifted_made), rtol=1e-5)
    np.testing.assert_allclose(divergence.outputs()[0].error, second.outgoing, rtol=1e-6)
    assert "if shifted replaces the recording there alone" in " ".join(str(divergence).split())


def test_scope_that_reads_unrecorded_values_has_no_introduced_error(recording):
    divergence = diverge(shifted, {"net.second": recording["net/second"]})(W, X)
    [row] = divergence.rows()
    assert math.isnan(row.introduced)
    assert math.isnan(row.incoming)
    assert row.outgoing > 0.01
    assert divergence.unaligned == (
        "net/second reads values of net/first, which the recording does not have (forward)",
    )
    assert [line.split()[3:6] for line in str(divergence).splitlines()[2:3]] == [["-", "-", f"{row.outgoing:.2g}"]]
    document = json.loads(json.dumps(divergence.to_dict(), allow_nan=False))
    assert document["rows"][0]["introduced"] is None
    assert not divergence.policy_map(1e-6).rules


@pytest.mark.slow
def test_operation_that_only_the_recorded_module_has_is_charged_to_it(recording):
    recording = recording | {"net": 3 * recording["net"]}  # such as a last norm that a port has forgotten
    rows = diverge(model, recording)(W, X).rows()
    assert [row.path for row in rows if row.introduced > 0.1] == ["net"]


def test_file_has_the_names_of_another_framework(tmp_path):
    recording = record(lambda w, x: model(w, x).astype(jnp.bfloat16))(W, X)
    assert {array.dtype.name for array in recording.values()} == {"float32"}
    names = {"net/first": "0", "result": "logits", "net/second": "net.second"}
    np.savez(tmp_path / "recording.npz", **{name: recording[path] for path, name in names.items()})
    names = {"0": "net/first", "logits": "result"}
    divergence = diverge(shifted, str(tmp_path / "recording.npz"), names=names)(W, X)
    assert [row.path for row in divergence.rows()] == ["net/first", "net/second"]
    assert [row.introduced > 1e-6 for row in divergence.rows()] == [True, False]
    assert [output.path for output in divergence.outputs()] == ["result"]


@pytest.mark.slow
def test_calls_of_a_module_have_numbers_or_are_a_list():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, scale=1.0):
            layer = nn.Dense(8, name="layer")
            return layer(scale * layer(x))

    net = Net()
    variables = net.init(jax.random.key(0), X)
    recording = record(net.apply)(variables, X)
    assert list(recording) == ["layer", "layer:1", "result"]
    apply = lambda variables, x: net.apply(variables, x, 1.5)
    [row] = diverge(apply, {"layer": [recording["layer"], recording["layer:1"]]})(variables, X).rows()
    expected = relative(recording["layer:1"], apply(variables, X))
    np.testing.assert_allclose(row.introduced, expected, rtol=1e-5)
    [row] = diverge(apply, {"layer": recording["layer:1"]})(variables, X).rows()
    np.testing.assert_allclose(row.outgoing, expected, rtol=1e-5)


def test_some_of_several_values_of_a_scope_are_found_by_number_or_stand_for_the_last_ones():
    def cell(x, scale=1.0):
        with jax.named_scope("cell"):
            outputs = jnp.tanh(x), scale * jnp.cos(x), jnp.sum(x), jnp.sin(x)
        return outputs[0] + outputs[1] + outputs[2] * outputs[3]

    recording = record(cell)(X)
    assert list(recording) == ["cell", "cell:1", "cell:2", "cell:3", "result"]
    recording["cell:0"] = recording["cell"]
    for name, error in {"cell:0": 0.0, "cell:1": 2.0, "cell:3": 0.0}.items():
        divergence = diverge(lambda x: cell(x, 3.0), {name: recording[name]})(X)
        np.testing.assert_allclose(divergence.rows()[0].introduced, error, rtol=1e-5)
        assert divergence.unaligned == ()
    divergence = diverge(cell, {"cell": recording["cell"]})(X)
    np.testing.assert_allclose(divergence.rows()[0].introduced, relative(jnp.tanh(X), jnp.sin(X)), rtol=1e-5)
    assert divergence.unaligned == (
        "'cell' of the recording: compared with the last of 3 values of shape (8, 8). 'cell:0' is the first",
    )
    given = {"cell:1": recording["cell:1"], "cell:7": recording["cell"]}
    divergence = diverge(lambda x: cell(x, 3.0), given)(X)
    np.testing.assert_allclose(divergence.rows()[0].introduced, 2.0, rtol=1e-5)
    assert divergence.unaligned == ("'cell:7' of the recording: the function has no value (8, 8) of that number",)


def test_scan_is_recorded_by_iteration():
    recording = jax.jit(record(scanned))(W, X)
    shapes = {name: array.shape for name, array in recording.items()}
    inner = dict.fromkeys(("loop/first", "loop/second"), (3, 8, 8))
    assert shapes == inner | {"loop": (8, 8), "result": (8, 8)}
    first, second, loop = diverge(lambda w, x: scanned(w, x, 0.1), recording)(W, X).rows()
    assert first.iterations == (0, 0, 0)
    expected = [relative(made, made + 0.1) for made in recording["loop/second"]]
    np.testing.assert_allclose(second.iterations, expected, rtol=1e-5)
    assert loop.introduced == 0


def test_stacked_outputs_of_a_scan_leave_the_scopes_in_it():
    def stack(x):
        with jax.named_scope("loop"):
            return jnp.sum(lax.scan(inner, 0.0, x)[1])

    def inner(carry, x):
        with jax.named_scope("first"):
            return carry, jnp.tanh(x)

    names = {name: array.shape for name, array in jax.eval_shape(record(stack), X).items()}
    assert names == {"loop": (), "loop/first": (8, 8), "result": ()}


@pytest.mark.slow
@pytest.mark.parametrize("model", [scanned])
def test_recorded_gradients_agree_with_those_of_two_functions(model):
    f, g = (jax.grad(lambda w, x, shift=shift: jnp.sum(model(w, x, shift) ** 2)) for shift in (0.0, 0.1))
    recorded = diverge(g, record(f)(W, X))(W, X)
    compared = {(row.path, row.direction): row for row in diverge(f, g)(W, X).rows()}
    found = {(row.path, row.direction): row for row in recorded.rows()}
    inner = [key for key in found if key[0].endswith(("first", "second"))]
    assert {direction for _, direction in inner} == {"forward", "backward"}
    for key in inner:
        np.testing.assert_allclose(found[key].introduced, compared[key].introduced, rtol=1e-3, atol=1e-6)
    assert recorded.unaligned == ()


FIRST = "net/first"
ERRORS = [
    (lambda: diverge(model, {"net/frist": X, "net/second": X[:2]})(W, X),
     r"No value of the recording belongs to a scope of the function: 'net/frist' of the recording is not a scope of "
     r"the function \(did you mean 'net/first'\?\); 'net/second' has shape \(2, 8\) in the recording, and \(8, 8\) in "
     r"the function. Name the values as the scopes, for example: 'net/first'"),
    (lambda: diverge(model, {})(W, X), r"No value of the recording belongs to a scope of the function: it is empty"),
    (lambda: diverge(model, {FIRST: [X, X]})(W, X), r"2 values of shape \(8, 8\) in the recording, and 1 in the func"),
    (lambda: diverge(model, {f"{FIRST}@backward": X})(W, X),
     r"the function has no backward pass of 'net/first', which the recording has"),
    (lambda: diverge(model, {"a": X}, {"b": "net"})(W, X),
     r"names has 'b', which the recording does not have. Known are 'a'"),
    (lambda: diverge(model, {"a": X}, {"a": "net/frist"})(W, X),
     r"names has 'a': 'net/frist', but the function has no scope or output 'net/frist'. Did you mean 'net/first'\?"),
    (lambda: diverge(model, {"net": np.zeros(2, "V2")})(W, X),
     r"'net' of the recording has the dtype \|V2: files of NumPy lose bfloat16.*array.astype\('float32'\)"),
    (lambda: diverge(jnp.argmax, {"a": X})(X), r"'a' of the recording is not a scope.*for example: 'result'"),
    (lambda: diverge(model, model, names={"a": "net"}),
     r"names=\{'a': 'net'\} renames recorded values, and <function model"),
    (lambda: record(3), r"record takes a function, got 3. For example: record\(train_step\)"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), ERRORS)
def test_recording_that_does_not_fit_is_an_error(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_results_that_a_recording_cannot_have_are_said_to_be_uncompared():
    def classify(w, x):
        scores = model(w, x)
        return scores, jnp.argmax(scores, -1)

    divergence = diverge(classify, record(classify)(W, X))(W, X)
    assert divergence.unaligned == ("result/1 is not compared: a recording has no integers or booleans",)


def test_scan_without_iterations_has_no_rows():
    def scan(weights, x):
        def step(x, w):
            with jax.named_scope("layer"):
                return jnp.tanh(x @ w), None

        with jax.named_scope("first"):
            x = x * 2
        return lax.scan(step, x, weights)[0]

    weights = jnp.ones((0, 8, 8))
    for g in (lambda weights, x: scan(weights, x * 1.5), record(scan)(weights, X)):
        assert "layer" not in [row.path for row in diverge(scan, g)(weights, X).rows()]


@pytest.mark.parametrize("damage", ["cut off", "empty", "another file", "one array"])
def test_a_damaged_file_is_an_error_that_names_it(damage, tmp_path):
    path = tmp_path / "recording.npz"
    np.savez(path, head=np.ones(1000, np.float32))
    whole = path.read_bytes()
    path.write_bytes({"cut off": whole[:-100], "empty": b"", "another file": b"text"}.get(damage, whole))
    if damage == "one array":
        with path.open("wb") as file:
            np.save(file, np.ones(3))
    with pytest.raises(
        ValueError, match=r"recording\.npz is damaged, or is not an \.npz file: .* For example: np\.savez"
    ):
        diverge(shifted, path)(W, X)
