"""The usage page: a read-only web page of the GPU usage by namespace and model."""
