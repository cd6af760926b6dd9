"""Operations that move elements: reshape, slice, pad, concat, shift, and look-up by index."""
