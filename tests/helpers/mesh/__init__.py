"""Programs for several mesh implementations, and ways to run them."""
