"""Values of a batch from those of its microbatches."""
