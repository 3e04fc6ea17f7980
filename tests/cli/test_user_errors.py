"""What is wrong with the functions, arguments and options of a user is one line, and status 2."""

import pytest

from jmp_policy.cli import main

pytestmark = pytest.mark.usefixtures("folder")

EXAMPLE = (
    "For example, write `def make_args(): return x, w` in user, where each is an array or, say, "
    "jax.ShapeDtypeStruct((8, 128), jnp.float32), and add --args user:make_args"
)
NAMES = {  # of a function to audit
    "good": "'good' is not the name of a function. For example: train:",
    "absent_module:f": "the module 'absent_module', of 'absent_module:f', is not here",
    "user.py:good": "'user.py', of 'user.py:good', is not a Python module name",
    "./user:good": "'./user', of './user:good', is not a Python module name",
    "user:produkt": "user has no 'produkt', of 'user:produkt'. Did you mean 'product'?",
    "user:zzz": "user has no 'zzz', of 'user:zzz'\n",
    "user:number": "'user:number' is not a function, but 3",
    "user:Model": "user:Model: audit takes a function, got <class 'user.Model'>",
    "user:product": f"user:product takes (x, w), and --args is missing. {EXAMPLE}\n",
    "user:variadic": "user:variadic takes (x, y=2, *rest), and --args is missing. For example, write `def make_args(): "
    "return x` in user, where",
}
CALLS = {  # of a function with arguments
    "audit product one": f"--args user:one returns 1 argument, but user:product takes (x, w). {EXAMPLE}\n",
    "audit product product": "--args user:product is called without arguments, but takes (x, w): give them defaults\n",
    "audit noisy_sum shapes": "--args user:shapes returns 2 arguments, but user:noisy_sum takes (x). For example",
    "audit one shapes": "--args user:shapes returns 2 arguments, but user:one takes (). Leave --args out.",
    "audit named one": "--args user:one returns 1 argument, but user:named takes (x, *, scale). Arguments by name "
    "cannot be given: write a function that passes scale itself.\n",
    "audit product no_arguments": "--args user:no_arguments raised RuntimeError: no data, at ",
    "numerics product shapes": "--args user:shapes returns ShapeDtypeStruct(shape=(2, 3), dtype=bfloat16): the "
    "function runs, and needs arrays with values, such as jax.random.normal(jax.random.key(0), (8, 128))",
    "numerics Model arguments": "user:Model: collect takes a function, got <class 'user.Model'>",
    "numerics failing arguments": "user:failing raised RuntimeError: no data, at ",
    "tune net shapes": "--args user:shapes returns ShapeDtypeStruct",
    "tune nan arguments": "nan returns nan or infinity in float32",
    "tune failing arguments": "user:failing raised RuntimeError: no data",
    "tune Model arguments": "user:Model: tune takes a function or a module, and Model is a class",
    "diverge product user:h arguments": "user has no 'h', of 'user:h'",
    "diverge product user:net shapes": "--args user:shapes returns ShapeDtypeStruct(shape=(2, 3), dtype=bfloat16)",
    "diverge product user:branch arguments": "--args user:arguments returns 2 arguments, but user:branch takes (x)",
    "diverge product missing.npz arguments": "missing.npz: [Errno 2] No such file or directory: 'missing.npz'",
}
OPTIONS = {  # of the command of a good function
    "numerics --formats float61": "Unknown format 'float61'",
    "numerics --of backwards": "of has 'backwards'. Did you mean 'backward'?",
    "numerics --where heat": "where has 'heat', but the function has no such operation, and no module or scope",
    "numerics --html no/page.html": "--html no/page.html: the folder no does not exist",
    "numerics --plot no/plot.png": "--plot no/plot.png: the folder no does not exist",
    "numerics --plot plot.bmpp": "--plot plot.bmpp is not an image format of matplotlib: name it plot.png",
    "tune --policy float32": "Nothing to tune: the policy 'float32' computes in float32.",
    "tune --policy float61": "Unknown dtype or policy 'float61'",
    "tune --tolerance 0": "The tolerance must be a relative error above 0 and at most 1, got 0.0.",
    "tune --tolerance 5": "The tolerance must be a relative error above 0 and at most 1, got 5.0.",
    "tune --trials no/trials": "--trials no/trials: the folder no does not exist",
    "tune --trials user.py": "user.py is not a file of trials, or is damaged, so it was not changed.",
    "tune --metric user:tran": "user has no 'tran', of 'user:tran'. Did you mean 'train'?",
}
COMMANDS = {"audit " + name: message for name, message in NAMES.items()}
for _words, _message in CALLS.items():
    _command, _function, *_others, _maker = _words.split()
    COMMANDS[" ".join([_command, f"user:{_function}", *_others, "--args", f"user:{_maker}"])] = _message
for _words, _message in OPTIONS.items():
    _command, *_options = _words.split()
    COMMANDS[" ".join([_command, "user:net", "--args", "user:arguments", *_options])] = _message


@pytest.mark.parametrize("command", COMMANDS)
def test_bad_input_is_one_line_and_status_2(command, capsys):
    assert main(command.split()) == 2
    check_error(capsys, COMMANDS[command])


@pytest.mark.parametrize(
    ("function", "maker", "message", "code"),
    [
        ("product", "unfit", "TypeError: dot_general requires contracting dimensions to have the same shape, got (3,) "
         "and (2,)", "return x @ w"),
        ("branch", "one", "TracerBoolConversionError: Attempted boolean conversion of traced array with shape bool[]",
         "def branch"),
        ("outer", "one", "ValueError", "def silent"),  # the innermost line
    ],
)  # fmt: skip
def test_what_the_users_code_raises_is_one_line_with_its_place(function, maker, message, code, capsys, line_of):
    assert main(["audit", f"user:{function}", "--args", f"user:{maker}"]) == 2
    assert line_of(code) in check_error(capsys, f"user:{function} raised {message}, at ")


@pytest.mark.parametrize(
    ("code", "message", "line"),
    [
        ("import absent_module", "ModuleNotFoundError: No module named 'absent_module', at ", "broken.py:1 (<module>)"),
        ("1 / 0", "ZeroDivisionError: division by zero, at ", "broken.py:1 (<module>)"),
        ("def f(:", "SyntaxError: invalid syntax (broken.py, line 1)", ""),
        ("raise SystemExit('use it so')", "SystemExit: use it so, at ", "broken.py:1 (<module>)"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line_with_its_place(code, message, line, tmp_path, capsys):
    (tmp_path / "broken.py").write_text(code)
    assert main(["audit", "broken:f"]) == 2
    assert check_error(capsys, f"broken cannot be imported: it raised {message}").endswith(f"{line}\n")


def check_error(capsys, message):
    """Checks that the error is one line that begins so, and returns it."""
    captured = capsys.readouterr()
    error = captured.err.replace("running\n", "")
    assert error.startswith(f"jmp-policy: error: {message}")
    assert (error.count("\n"), captured.out) == (1, "")
    return error
