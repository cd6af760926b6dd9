"""Variables: slice variables, masters and variable stores."""
