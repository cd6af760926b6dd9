"""Variables, their values, and assignments to them."""
