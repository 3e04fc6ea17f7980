"""Everything that an audit can find, by name: what it is, and what is lost."""

from ..explanation._half_sums import REMEDY

FINDINGS = {
    "float32-matmul": "a matrix product or convolution in float32, in a program that has half precision elsewhere",
    "accidental-promotion": "float32 for no reason but the dtype of a constant, a parameter or an array that the "
    "program makes, where half would follow",
    "half-reduction": "a sum or product of many numbers in half precision: its error grows with their count",
    "half-cumulative": "a cumulative sum or product in half precision: its error grows along the axis",
    "round-trip-cast": "half precision widened and narrowed again with nothing computed between",
    "float16-exp": "an exponential in float16, which overflows at 11.1",
    "float16-log": "a logarithm in float16, whose argument may have been rounded to zero",
    "float16-softmax": "a softmax in float16: small probabilities become zero",
    "float16-norm": "the root of a sum of squares in float16: squares overflow at 256, and are zero below 2.4e-4",
    "half-logits": "a loss computed from logits in half precision",
    "log-of-softmax": "the logarithm of a softmax that was rounded to half precision: log(0) is -inf",
    "log-of-sigmoid": "the logarithm of a sigmoid that was rounded to half precision: log(0) is -inf",
    "half-gradient": "a gradient that is summed in half precision over the uses of a weight",
    "infinite-constant": "a finite constant that is infinite in half precision",
    "half-all-reduce": "a sum over devices in half precision",
}
"""The names of findings, and what each is."""

REMEDIES = {
    "float32-matmul": "cast what it reads, or give the layer a dtype",
    "accidental-promotion": "cast the float32 operand, or widen the other one where that is meant",
    "half-reduction": REMEDY,
    "half-cumulative": "cast to float32 first",
    "round-trip-cast": "leave both casts out",
    "float16-exp": "cast to float32 first",
    "float16-log": "cast to float32 first",
    "float16-softmax": "cast to float32 first",
    "float16-norm": "square and sum in float32",
    "half-logits": "cast the logits to float32",
    "log-of-softmax": "use jax.nn.log_softmax of float32 logits",
    "log-of-sigmoid": "use jax.nn.log_sigmoid of float32 logits",
    "half-gradient": "cast the weight at each use, inside of a loop, after a lookup; or add in float32",
    "infinite-constant": "use jnp.finfo(x.dtype).min or .max, or -jnp.inf where that is meant",
    "half-all-reduce": "cast to float32 before, and back after",
}
