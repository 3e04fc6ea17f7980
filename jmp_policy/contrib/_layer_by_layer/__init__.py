"""`gptq` and `awq`: round the weights of a model one after another, for the inputs that data gives to them."""

from ._awq import awq as awq
from ._gptq import gptq as gptq
