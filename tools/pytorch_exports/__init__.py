"""Small PyTorch models, and what exports them to ONNX with their shardings and PyTorch's own numbers."""
