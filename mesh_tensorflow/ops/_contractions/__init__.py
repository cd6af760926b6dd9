"""Operations that sum over dimensions: einsum, convolutions, reductions, and normalizations."""
