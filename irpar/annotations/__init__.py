"""Annotations in the words of other systems. All of them become what `module.shard` says: the same IR.

from irpar.annotations import gshard, gspmd, mesh_tensorflow, mindspore, onnx_annotations
from irpar.annotations import pytorch_dtensor, tensorflow_dtensor

A module per system; each function is called as that system calls it, with the module and the name of a tensor or
operator (or a glob over names) in place of the tensor. docs/shardings.md shows one annotation in every spelling.
"""
