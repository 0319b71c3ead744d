"""The parts of benchmarks/gpu/check.py."""
