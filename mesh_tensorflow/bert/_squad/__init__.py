"""Question answering (SQuAD): examples, features and answers."""
