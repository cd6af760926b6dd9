"""The data of a run: batches of NumPy arrays, and what their dimensions are."""
