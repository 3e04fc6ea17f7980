"""Certificates: interval analysis of a small function's jaxpr."""

from ._certificate import Certificate as Certificate, certify as certify
