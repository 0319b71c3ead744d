"""Which nodes of a graph compute with the channels of images last, and how they do."""

from .rewriting import put_channels_last

__all__ = ["put_channels_last"]
