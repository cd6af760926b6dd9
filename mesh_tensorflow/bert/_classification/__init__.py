"""Sentence classification: data sets and features."""
