"""What users see of programs that run: errors by operation, NaNs, values, marks in profiles."""
