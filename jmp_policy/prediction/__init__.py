"""What a policy would lose, told from statistics of a run without it: `numerics.predict` stands on this."""
