"""BERT: the model, pre-training, and fine-tuning for classification and question answering."""
