"""What a trained model is used for: decoding, scores and exported models."""
