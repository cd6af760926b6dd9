"""Questions about paragraphs: examples, features and answers."""
