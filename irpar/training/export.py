"""Weights of a checkpoint back in the model that they were trained of."""

from irpar.differentiation import weights_by_name
from irpar.ir import LazyTensor, Module, Tensor
from irpar.ir.state import MODEL_KINDS
from irpar.output.checkpoint import Checkpoint, CheckpointError
from irpar.passes.optimizer.names import MASTER


def put_weights(module: Module, checkpoint: Checkpoint) -> int:
    """Give the initializers of a model the numbers that a checkpoint has for them.

    Parameters of a narrower dtype than the model's are taken from their master.

    Args:
        module: the model as it is loaded.
        checkpoint: of a step that was made of it.

    Returns:
        How many.

    Raises:
        CheckpointError: the model has no such initializer, or one of another shape.
    """
    known = weights_by_name(module)
    count = 0
    for name, entry in checkpoint.tensors.items():
        if entry.kind not in MODEL_KINDS:
            continue
        value = known.get(name)
        if value is None or value.data is None or value.data.shape != entry.shape:
            has = "no such initializer" if value is None else f"{value.type}"
            raise CheckpointError(
                f"the model is not the one that was trained: the checkpoint has {name} "
                f"{entry.dtype}{list(entry.shape)}, the model {has}",
                where=str(checkpoint.path),
                do="give the model that irpar train was given",
            )
        best = name + MASTER if name + MASTER in checkpoint.tensors else name
        value.data = _as(checkpoint.full(best), value.data)
        count += 1
    return count


def _as(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor in the dtype of another."""
    if tensor.dtype is like.dtype:
        return tensor
    return LazyTensor(like.dtype, tensor.shape, lambda: tensor.numpy().astype(like.dtype.numpy))
