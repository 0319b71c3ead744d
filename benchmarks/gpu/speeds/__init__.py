"""irpar beside PyTorch on one GPU: cases, both sides of each, what the device can do, the report."""
