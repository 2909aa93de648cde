"""Which models and nodes a pod may use, and the patch that pins it there."""
