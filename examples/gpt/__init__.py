"""A byte-level GPT that trains in mixed precision: `python -m examples.gpt train`, from the root of a clone.

It uses the public names of `jmp_policy` alone, and needs `pip install -e '.[demo]'`. Read the files in this order:

- `model.py`: sizes, attention, loss, and the optimizer with its loss scale.
- `gpt_linen.py`, `gpt_nnx.py`: the model and its train step, once in each Flax API.
- `data.py`: bytes to train on, batches, and the losses that counting bytes achieves.
- `train.py`: the training loop, statistics of tensors, verdicts on skipped steps, and the plot.
- `run.py`: the folder of a run, its configuration, metrics and checkpoints.
- `devices.py`: a mesh of several devices, and several processes.
- `compare.py`: the same training in float32, bfloat16 and float16, side by side.
"""


class UserError(ValueError):
    """Says in one line why the user's input fails, and gives one that works.

    The command line prints it without a traceback and exits with status 2.
    """
