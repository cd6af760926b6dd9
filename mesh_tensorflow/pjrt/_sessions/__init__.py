"""Programs of sessions on devices of JAX: cutting them out, running them, in several processes."""
