"""What is asked: an experiment as typed, plain data. Nothing here needs torch or a model."""
