"""What devices send each other in a program, read off its jaxpr or off what XLA's partitioner makes of it."""
