"""What a program runs on: laid-out tensors, slices and the vocabulary of collectives."""
