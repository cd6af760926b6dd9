"""Programs that run in this package and in the classic release, and what runs them."""
