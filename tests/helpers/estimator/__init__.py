"""Models that estimators train."""
