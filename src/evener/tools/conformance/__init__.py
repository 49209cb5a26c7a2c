"""The batteries of :mod:`evener.testing`."""
