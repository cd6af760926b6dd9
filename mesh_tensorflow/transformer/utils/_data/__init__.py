"""From data sets and texts to features of a mesh."""
