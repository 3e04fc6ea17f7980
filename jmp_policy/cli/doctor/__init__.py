"""Measures how fast a machine trains in each dtype. It needs no extra of the package."""

from ._diagnosis import diagnose as diagnose, find_machine as find_machine, list_versions as list_versions
