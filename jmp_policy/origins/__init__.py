"""Where numbers that are not finite come from, found inside `jit`."""
