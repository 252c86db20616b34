"""What is right and how fast it is on one GPU, in one command: see `benchmarks.gpu.__main__`."""
