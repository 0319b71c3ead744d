"""Operators that draw random numbers: their definitions say no more."""

from functools import partial

from irpar.ir import Node

from .facts import ints_operand, operand
from .gradients.refused import RANDOM_MASK
from .gradients.zero import zero
from .microsoft import DOMAIN
from .op_def import OpDef
from .registry import define


def _may_train(node: Node, index: int) -> bool:
    """True for a fused dropout whose operand `training_mode` is there and not known to be false."""
    mode = operand(node, index)
    return mode is not None and (mode.data is None or ints_operand(node, index) != (0,))


for _name in ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"):
    define(OpDef("", _name, random=True, gradient=zero))
for _name, _index in (("BiasDropout", 4), ("BitmaskBiasDropout", 4), ("BitmaskDropout", 2)):
    define(OpDef(DOMAIN, _name, random=partial(_may_train, index=_index), gradient=RANDOM_MASK))
