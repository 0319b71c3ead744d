"""The error of everything that is wrong with an ONNX model, or that irpar does not take."""

from irpar.sharding import IrparError


class OnnxError(IrparError):
    """An ONNX model that cannot be read, or a module that cannot be written as one."""

    def inside(self, place: str) -> "OnnxError":
        """The same error with one more place in front: file, node, value, from the outside in."""
        where = f"{place}, {self.where}" if self.where else place
        return OnnxError(self.what, where=where, notes=self.notes, do=self.do)


def text_of(given: str) -> str:
    """A string field of a protobuf, which gives bytes where it is not UTF-8.

    Raises:
        OnnxError: it is not UTF-8.
    """
    if type(given) is not str:
        raise OnnxError(f"{given!r:.60} is not UTF-8 text", do="the file is damaged: export or copy it again")
    return given
