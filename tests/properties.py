"""How many examples a property test draws."""

from hypothesis import settings


def examples(count: int) -> settings:
    """Returns settings for `count` examples, the same in each run, or four times as many random ones in slow runs."""
    return settings(max_examples=count if settings.default.derandomize else 4 * count, deadline=None)
