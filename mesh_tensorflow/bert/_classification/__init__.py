"""Classification of sentences: data sets and features."""
