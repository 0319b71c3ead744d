"""The models in plain PyTorch: small enough that their exports are kept as test fixtures."""
