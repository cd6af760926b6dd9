"""Models, data and processes for tests of the trainer."""
