"""Data of BERT's programs."""
