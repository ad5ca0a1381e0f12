"""Gradients that travel together: the memory in which they lie, how they are averaged, and which share a bucket."""
