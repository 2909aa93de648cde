"""Reads the GPU requests of pods. The resources by which one vendor's GPUs are requested are a scheme."""
