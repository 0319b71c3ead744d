"""Layers: equal subgraphs that a model repeats, up to weights, found by structure alone."""

from .find import Layers, find_layers
from .record import LAYER_DOMAIN, LAYER_KEY

__all__ = ["LAYER_DOMAIN", "LAYER_KEY", "Layers", "find_layers"]
