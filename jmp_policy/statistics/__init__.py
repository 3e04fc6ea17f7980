"""Statistics of many tensors: a pytree of arrays, the rows that it holds, and how they are shown."""
