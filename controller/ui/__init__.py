"""The usage page: a read-only web page that shows the GPU usage by namespace and GPU model."""
