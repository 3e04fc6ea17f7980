"""One tensor, measured inside `jit`: counts, extremes and sums that add up, and what number formats would do to it."""
