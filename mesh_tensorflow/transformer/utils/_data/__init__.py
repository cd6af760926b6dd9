"""Input pipelines: data sets and texts to features on a mesh."""
