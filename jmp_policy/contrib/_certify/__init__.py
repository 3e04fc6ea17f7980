"""Certificates: interval analysis of a small function's jaxpr."""

from ._certificate import Certificate as Certificate
from ._certify import certify as certify
