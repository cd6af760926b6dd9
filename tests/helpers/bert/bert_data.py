"""Tiny data of BERT's programs: text, questions, and records with hidden tokens."""

import json
import os
import random

import numpy as np
import tensorflow.compat.v1 as tf

WORDS = """the cat sat on mat a dog ran far good bad movie was is very where did who house red blue
. , ?""".split()
TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
CONFIG = {
    "vocab_size": len(TOKENS),
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 32,
    "type_vocab_size": 2,
    "initializer_range": 0.3,
}
PARAGRAPHS = [
    ("the cat sat on the mat . the dog ran far", "where did the cat", "on the mat"),
    ("the dog ran far . the red house is very far", "who ran", "the dog"),
    ("a movie was bad . the blue house was good", "where is the blue", "good"),
    ("the dog sat on the house . the cat was bad", "who was bad", "the cat"),
]


def write_model(directory, **options):
    """Writes a vocabulary and a configuration."""
    with open(os.path.join(directory, "vocab.txt"), "w") as f:
        f.write("\n".join(TOKENS) + "\n")
    with open(os.path.join(directory, "config.json"), "w") as f:
        json.dump({**CONFIG, **options}, f)


def write_cola(directory, train=16, dev=7, test=5):
    """Sentences that are about a good movie, or a bad one."""
    r = random.Random(0)

    def row(label):
        movie = f"{r.choice(['the', 'a'])} movie was {r.choice(['', 'very '])}"
        return movie + ["bad", "good"][label]

    for split, count in (("train", train), ("dev", dev)):
        with open(os.path.join(directory, f"{split}.tsv"), "w") as f:
            f.writelines(f"x\t{i % 2}\t\t{row(i % 2)}\n" for i in range(count))
    with open(os.path.join(directory, "test.tsv"), "w") as f:
        f.write("index\tsentence\n")
        f.writelines(f"{i}\t{row(i % 2)}\n" for i in range(test))
    return [i % 2 for i in range(test)]


def write_squad(directory):
    """Questions with answers; returns the answers by question."""
    paragraphs = [
        {
            "context": context,
            "qas": [
                {
                    "id": f"q{i}",
                    "question": question,
                    "is_impossible": False,
                    "answers": [{"text": answer, "answer_start": context.index(answer)}],
                }
            ],
        }
        for i, (context, question, answer) in enumerate(PARAGRAPHS)
    ]
    with open(os.path.join(directory, "squad.json"), "w") as f:
        json.dump({"data": [{"title": "t", "paragraphs": paragraphs}]}, f)
    return {f"q{i}": answer for i, (_, _, answer) in enumerate(PARAGRAPHS)}


def write_hidden_tokens(directory, files=2, count=12, length=12, hidden=3):
    """Records of sequences that count up; some of their tokens are hidden."""
    r = np.random.RandomState(0)
    for number in range(files):
        path = os.path.join(directory, f"hidden{number}.tfrecord")
        with tf.io.TFRecordWriter(path) as writer:
            for _ in range(count):
                label, start = r.randint(2), r.randint(5, 9)
                ids = np.concatenate([[2], start + np.arange(length - 1)])
                if label:
                    ids[length // 2 :] = ids[length // 2 :][::-1]
                places = 1 + r.permutation(length - 1)[:hidden]
                values = {
                    "input_mask": np.ones(length, int),
                    "masked_lm_positions": places,
                    "segment_ids": (np.arange(length) >= length // 2).astype(int),
                    "masked_lm_ids": ids[places],
                    "next_sentence_labels": [label],
                }
                ids = ids.copy()
                ids[places] = 4
                values["input_ids"] = ids
                feature = {
                    name: tf.train.Feature(int64_list=tf.train.Int64List(value=list(map(int, v))))
                    for name, v in values.items()
                }
                feature["masked_lm_weights"] = tf.train.Feature(
                    float_list=tf.train.FloatList(value=[1.0] * (hidden - 1) + [0.0])
                )
                writer.write(
                    tf.train.Example(
                        features=tf.train.Features(feature=feature)
                    ).SerializeToString()
                )
    return os.path.join(directory, "hidden*.tfrecord")
