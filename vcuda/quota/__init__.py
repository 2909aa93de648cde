"""The quota document (the GPU limits of each namespace), its checks, and the amounts of GPU that pods are charged."""
