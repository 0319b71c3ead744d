"""What a segment gives the stream of a rank, captured in CUDA graphs and replayed: nothing in Python for each node."""
