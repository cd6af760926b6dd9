"""From programs to TensorFlow: graph rewrites, counters, and the Lowering."""
