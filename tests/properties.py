"""How many examples a property test draws."""

from hypothesis import settings


def examples(count: int) -> settings:
    """Returns settings for `count` examples, the same in each run, or ten times as many random ones under `explore`."""
    return settings(max_examples=count if settings.default.derandomize else 10 * count, deadline=None)
