"""Operations that move elements: reshape, slice, pad, concat, shift, and lookup by index."""
