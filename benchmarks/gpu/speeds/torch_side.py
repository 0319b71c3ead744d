"""PyTorch's side of a case: the module, eager and compiled, and steps of training."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from .cases import LEARNING_RATE, Case, tensor_of
from .stopwatch import Subject

STATIC_BYTES = 1 << 20
"""Inputs from this size on are said to stay where they are, so that a captured graph copies none of them."""
WARM = 4
"""Calls until a compiled module is captured and replayed."""


class TorchSide:
    """A case in PyTorch, with the fastest convolutions that cuDNN finds.

    Args:
        case: it.
        device: "cuda" or "cpu".
        mode: of `torch.compile`; "": eager.
    """

    def __init__(self, case: Case, device: str, mode: str = "") -> None:
        self._case = case
        self._device = device
        self._mode = mode
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = case.is_tf32
        torch.backends.cudnn.benchmark = True
        self._inputs = {name: tensor_of(array, device) for name, array in case.inputs.items()}
        self._module = case.torch_module(device)
        if case.family == "resnet" and case.dtype != "float32":
            self._module.to(memory_format=torch.channels_last)
            self._inputs = {
                name: one.contiguous(memory_format=torch.channels_last) for name, one in self._inputs.items()
            }
        self._run = self._training_step() if case.is_training else self._forward()

    @property
    def subject(self) -> Subject:
        """To be timed."""
        return Subject(self._run, self.wait)

    def __call__(self) -> list[Any]:
        """The results, those of the next run elsewhere."""
        found = self._run()
        return [one.detach().clone() for one in (found if isinstance(found, tuple | list) else (found,))]

    def warm(self) -> None:
        """Compile, capture and replay."""
        for _ in range(WARM):
            self._run()
        self.wait()

    def wait(self) -> None:
        """Until the device is done."""
        if self._device == "cuda":
            torch.cuda.synchronize()

    def whole(self) -> Callable[[], Any]:
        """A run from arrays of the host to there."""
        arrays = list(self._case.inputs.values())

        def run() -> Any:
            for placed, array in zip(self._inputs.values(), arrays, strict=True):
                placed.copy_(tensor_of(array, "cpu"))
            found = self._run()
            return [one.detach().cpu() for one in (found if isinstance(found, tuple | list) else (found,))]

        return run

    def _forward(self) -> Callable[[], Any]:
        self._module.eval().requires_grad_(False)
        module = self._compiled(self._module)
        inputs = list(self._inputs.values())

        def run() -> Any:
            with torch.no_grad():
                self._begin()
                return module(*inputs)

        return run

    def _training_step(self) -> Callable[[], Any]:
        module, ids, target = self._module.train(), self._inputs["input_ids"], self._inputs["target"]
        is_mixed, on_cuda = self._case.dtype != "float32", self._device == "cuda"
        optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, weight_decay=0.01, fused=on_cuda)
        narrow = getattr(torch, self._case.dtype)

        def loss_of(ids: Any, target: Any) -> Any:
            with torch.autocast(self._device, narrow, enabled=is_mixed):
                return functional.cross_entropy(module(ids).flatten(0, 1), target.flatten())

        compiled = self._compiled(loss_of)

        def run() -> Any:
            self._begin()
            loss = compiled(ids, target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss

        return run

    def _begin(self) -> None:
        if self._mode:
            torch.compiler.cudagraph_mark_step_begin()

    def _compiled(self, function: Any) -> Any:
        if not self._mode:
            return function
        for one in self._inputs.values():
            if one.nbytes >= STATIC_BYTES:
                torch._dynamo.mark_static_address(one)
        return torch.compile(function, mode=self._mode, dynamic=False)


@contextmanager
def tf32_allowed(is_allowed: bool) -> Iterator[None]:
    """In here products and convolutions of float32 may round their operands to TF32, or not."""
    flags = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [flag.allow_tf32 for flag in flags]
    for flag in flags:
        flag.allow_tf32 = is_allowed
    try:
        yield
    finally:
        for flag, was in zip(flags, before, strict=True):
            flag.allow_tf32 = was


def as_tensor(array: Any) -> Any:
    """A result of either side as a tensor, on the device where it lies."""
    if isinstance(array, torch.Tensor):
        return array
    if isinstance(array, np.ndarray | np.generic):
        return tensor_of(np.asarray(array), "cpu")
    if array.dtype.name == "bfloat16":
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def difference(one: Any, other: Any, chunk: int = 1 << 26) -> float:
    """|one - other| / |other| of tensors as vectors; infinite where shapes differ or a number is not finite."""
    if tuple(one.shape) != tuple(other.shape):
        return float("inf")
    apart, size = 0.0, 0.0
    for mine, its in zip(one.reshape(-1).split(chunk), other.reshape(-1).split(chunk), strict=True):
        beside = its.to(mine.device, torch.float32)
        apart += float((mine.float() - beside).square().sum(dtype=torch.float64))
        size += float(beside.square().sum(dtype=torch.float64))
    found = (apart / size) ** 0.5 if size else apart**0.5
    return found if np.isfinite(found) else float("inf")
