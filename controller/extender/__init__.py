"""The scheduler extender, which runs in the leading controller. It chooses the nodes and GPUs of vcuda pods."""
