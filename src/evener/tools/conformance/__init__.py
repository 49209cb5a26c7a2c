"""Conformance tests of :mod:`evener.testing`."""
