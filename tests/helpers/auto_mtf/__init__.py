"""Programs that layouts are searched for."""
