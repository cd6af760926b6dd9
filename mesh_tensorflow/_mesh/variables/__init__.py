"""Variables: their slices, masters and stores."""
