"""ONNX's own backend cases against irpar: `python -m tests.conformance` prints the table, slow tests assert it."""
