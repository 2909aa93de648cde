"""The permissions of a quota entry."""

import enum


class Allowance(enum.StrEnum):
    """Pod settings that can give a pod more GPU than it is charged. A pod may use only the settings that the key
    `allow` of its namespace's quota entry lists.

    A share is a part of a card. A library in the container limits the container to its share.
    """

    PRIVILEGED = "privileged"
    """A privileged container, or a HostProcess container of Windows. Each can use every device of its node."""
    VISIBLE_DEVICES = "visible-devices"
    """Environment variables that make the container runtime add devices, such as NVIDIA_VISIBLE_DEVICES."""
    RUNTIME_CLASS = "runtime-class"
    """A runtime class for GPUs in a pod that requests no GPU."""
    DISABLE_CONTROL = "cuda-disable-control"
    """Environment variables that turn off all limits of a share of a card."""
    CORE_POLICY = "core-utilization-policy"
    """HAMi's environment variable that turns off the core limit of a share of a card."""
    COMPUTE_POLICY = "vgpu-compute-policy"
    """vgpu-manager's annotation that turns off the core limit of a share of a card."""
    MEMORY_LIMIT = "memory-limit-variables"
    """Environment variables that set the memory limit of a share of a card, or make this limit less strict."""
    CORE_LIMIT = "core-limit-variables"
    """Environment variables that set the core limit of a share of a card, or make this limit less strict."""
    LIMIT_LIBRARY = "limit-library"
    """Environment variables and mounts that replace the library that limits a share, or the library's files."""
    GPU_FRACTION = "gpu-fraction"
    """The annotation by which a pod requests a share of a card from the scheduler KAI."""
    GPU_MEMORY = "gpu-memory"
    """The annotation by which a pod requests an amount of a card's memory from the scheduler KAI."""
