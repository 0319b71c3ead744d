"""Gradients of operators in ONNX's own operators; a module per family, as in `irpar.ops`."""
