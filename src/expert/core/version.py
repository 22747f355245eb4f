"""The version of Expert."""

__version__ = "0.1.0"
