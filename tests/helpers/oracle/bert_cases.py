"""What BERT's programs make of texts: run in whichever package is installed.

make_bert.py writes what the classic makes of these to fixtures/bert_data.json.
"""

import json
import os
import random
import zlib

import numpy as np
import tensorflow.compat.v1 as tf

WORDS = """the cat sat on mat a dog ran far good bad movie was is very not who where did run sit big
red blue house tree it in of to steve smith lived 1895 ##s ##ed ##ing ##5 ##th un ##believ ##able , . ?
! ' ( ) - " : ; $ caf ##e e naive the##re""".split()
VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused1]", "[unused2]", "\u4e2d", "\u6587", *WORDS]
ALPHABET = (
    "abcdeXYZ  \t\n.,!?'()-$#@[]\u00e9\u00c9\u0301\u00df\u00f1\u0130\u00a0\u2003\u3000\u200b\u00ad\u0000"
    "\ufffd\u4e2d\u6587\u3400\u9fff\uac00\u304b\u30ab\u2014\u2026\u00bf\u060c\u0915\u094d\U00020001\U0001f600"
    "\u0007\u0085\u2028\ufeff\uff0c\uff21\u0660\u00bd\u01c5\ue000")
COLA = [["x", "1", "", "The cat sat on the mat."], ["x", "0", "*", "cat the mat unbelievable a very bad movie"]]
PAIRS = [["1", "a", "b", "the cat sat", "a dog ran far"], ["0", "c", "d", "good " * 9, "bad movie, bad " * 3]]


def write_vocab(directory):
    path = os.path.join(directory, "vocab.txt")
    with open(path, "w", encoding="utf-8") as f:
        f.write("\n".join(VOCAB) + "\n")
    return path


def rng(name):
    return random.Random(zlib.crc32(name.encode()))


def texts():
    """A few hundred strings: of letters of all kinds, and of words."""
    r = rng("texts")
    found = ["", " ", "[unused1]", "Hello [unused1], [UNUSED2] [MASK]", "x" * 201, "unbelievable" * 20]
    for _ in range(200):
        found.append("".join(r.choice(ALPHABET) for _ in range(r.randrange(1, 14))))
    for _ in range(100):
        words = [r.choice(WORDS).replace("##", "") for _ in range(r.randrange(1, 8))]
        found.append("".join(w.capitalize() + r.choice(["", " ", "  ", "-", "\u00e9"]) for w in words))
    return found


def tokenized(directory):
    from mesh_tensorflow.bert import tokenization
    vocab = write_vocab(directory)
    found = []
    for lower in (True, False):
        basic = tokenization.BasicTokenizer(do_lower_case=lower)
        full = tokenization.FullTokenizer(vocab, do_lower_case=lower)
        for text in texts():
            pieces = full.tokenize(text)
            found.append([basic.tokenize(text), pieces, full.convert_tokens_to_ids(pieces)])
    return found


# -- classification


def write_tsv(path, rows):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as f:
        f.writelines("\t".join(row) + "\n" for row in rows)


def write_tables(directory):
    header = [f"column{i}" for i in range(12)]
    nli = [
        [str(i), *"bcdefgh", "the cat sat", "a dog ran", "k", label]
        for i, label in enumerate(["neutral", "contradiction", "entailment"])]
    tables = {
        "cola/train.tsv": COLA, "cola/dev.tsv": COLA[:1], "cola/test.tsv": [["index", "s"], ["0", "it is"]],
        "mrpc/train.tsv": [header[:5], *PAIRS], "mrpc/dev.tsv": [header[:5], PAIRS[1]],
        "mrpc/test.tsv": [header[:5], PAIRS[0]],
        "mnli/train.tsv": [header, *nli], "mnli/dev_matched.tsv": [header, nli[1]],
        "mnli/test_matched.tsv": [header, nli[2]],
        "xnli/multinli/multinli.train.zh.tsv": [["p", "h", "l"], ["\u4e2d", "\u6587", "contradictory"], ["a", "b", "neutral"]],
        "xnli/xnli.dev.tsv": [header[:8], ["zh", "entailment", "", "", "", "", "\u4e2d", "\u6587"], ["en", "neutral", "", "", "", "", "a", "b"]],
    }
    for name, rows in tables.items():
        write_tsv(os.path.join(directory, name), rows)


def records(path):
    """The features of a file of records, as lists by name."""
    found = []
    for record in tf.python_io.tf_record_iterator(path):
        feature = tf.train.Example.FromString(record).features.feature
        found.append({name: list(x.int64_list.value) for name, x in sorted(feature.items())})
    return found


def classified(directory):
    from mesh_tensorflow.bert import run_classifier as c
    from mesh_tensorflow.bert import tokenization
    write_tables(directory)
    tokenizer = tokenization.FullTokenizer(write_vocab(directory))
    found = {}
    processors = {
        "cola": c.ColaProcessor, "mrpc": c.MrpcProcessor, "mnli": c.MnliProcessor, "xnli": c.XnliProcessor}
    for name, make in processors.items():
        processor, data = make(), os.path.join(directory, name)
        splits = ["train", "dev", "test"] if name != "xnli" else ["train", "dev"]
        examples = [e for split in splits for e in getattr(processor, f"get_{split}_examples")(data)]
        found[name + "/examples"] = [[e.guid, e.text_a, e.text_b, e.label] for e in examples]
        found[name + "/labels"] = list(processor.get_labels())
        path = os.path.join(directory, name + ".tf_record")
        c.file_based_convert_examples_to_features(
            [*examples, c.PaddingInputExample()], processor.get_labels(), 16, tokenizer, path)
        found[name + "/records"] = records(path)
    features = c.convert_examples_to_features(examples[:2], processor.get_labels(), 9, tokenizer)
    found["features"] = [
        [f.input_ids, f.input_mask, f.segment_ids, f.label_id, f.is_real_example] for f in features]
    return found


# -- questions

CONTEXTS = [
    "The cat sat on the mat. A dog ran far,  very far! It was (1895-1943). Caf\u00e9 \u4e2d\u6587 na\u00efve",
    "Steve Smith's house is big\u202fand red; the tree is not. Where did it run? It ran to the house of Steve Smith.",
    "mat",
]
QUESTIONS = [
    (0, "Where did the cat sit?", "on the mat", False), (0, "Who ran far?", "dog", False),
    (0, "1895?", "1895", False), (0, "What is not there", "caf\u00e9 \u4e2d", False), (1, "Who?", "Steve Smith", False),
    (1, "nothing", None, True), (1, "Where did it run to? " * 5, "the house of Steve Smith.", False),
    (2, "mat?", "mat", False),
]


def squad_file(directory):
    paragraphs = [{"context": c, "qas": []} for c in CONTEXTS]
    for number, (where, question, answer, impossible) in enumerate(QUESTIONS):
        answers = []
        if answer is not None:
            at = CONTEXTS[where].lower().index(answer.lower())
            answers = [{"text": CONTEXTS[where][at:at + len(answer)], "answer_start": at}]
            if number == 3:
                answers[0]["text"] = "Caf\u00e9 xx"
        paragraphs[where]["qas"].append(
            {"id": f"q{number}", "question": question, "answers": answers, "is_impossible": impossible})
    path = os.path.join(directory, "squad.json")
    with open(path, "w", encoding="utf-8") as f:
        json.dump({"data": [{"title": "t", "paragraphs": paragraphs}]}, f)
    return path


def described(feature):
    return {
        name: sorted([k, v] for k, v in value.items()) if isinstance(value, dict) else value
        for name, value in sorted(vars(feature).items())}


def results(features):
    r = np.random.RandomState(3)
    return [
        [f.unique_id, *(np.round(r.normal(size=len(f.input_ids)), 3).tolist() for _ in range(2))]
        for f in features]


def final_texts(s):
    r = rng("final")
    cases = [
        ("steve smith", "Steve Smith's"), ("steve smith", "Steve  Smith's house"), ("x", "abc"),
        ("cafe", "Caf\u00e9 is"), ("1895", "(1895-1943)."), ("", "abc"), ("\u4e2d", "a\u4e2d\u6587"), ("i", "\u0130stanbul x"),
    ]
    for _ in range(60):
        text = " ".join(r.choice(["Cat's", "Caf\u00e9", "(1895)", "big-red", "\u4e2d\u6587", "na\u00efve", "A.B."]) for _ in range(4))
        words = text.lower().replace("\u00e9", "e").replace("\u00ef", "i").replace("'", " ' ").replace("-", " - ").split()
        at = r.randrange(len(words))
        cases.append((" ".join(words[at:at + r.randrange(1, 4)]), text))
    return [[s.get_final_text(p, t, lower) for p, t in cases] for lower in (True, False)]


def answered(directory):
    from mesh_tensorflow.bert import run_squad as s
    from mesh_tensorflow.bert import tokenization
    flags = tf.flags.FLAGS
    path = squad_file(directory)
    tokenizer = tokenization.FullTokenizer(write_vocab(directory))
    found = {}
    for training in (True, False):
        flags.version_2_with_negative = training
        examples = s.read_squad_examples(path, training)
        key = f"training={training}"
        found[key + "/examples"] = [vars(e) for e in examples]
        features = []
        s.convert_examples_to_features(examples, tokenizer, 24, 5, 10, training, features.append)
        found[key + "/features"] = [described(f) for f in features]
        record = os.path.join(directory, key.replace("=", "_"))
        writer = s.FeatureWriter(record, training)
        for feature in features:
            writer.process_feature(feature)
        writer.close()
        found[key + "/records"] = records(record)[:3]
    found["final_texts"] = final_texts(s)
    raw = [s.RawResult(*r) for r in results(features)]
    for version_2 in (False, True):  # where the classic fails if all of the best are no answer
        for threshold in (0.0, -3.0):
            flags.version_2_with_negative, flags.null_score_diff_threshold = version_2, threshold
            paths = [os.path.join(directory, name) for name in ("best", "nbest", "null")]
            s.write_predictions(
                examples, features, raw, 24 if version_2 else 4, 5, True, *paths)
            for name, path in zip(("best", "nbest", "null"), paths[:2 + version_2]):
                with open(path, encoding="utf-8") as f:
                    found[f"version_2={version_2},{threshold}/{name}"] = json.load(f)
    return found


# -- model functions

CONFIG = {
    "vocab_size": 40, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 8, "hidden_act": "gelu", "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 16, "type_vocab_size": 2,
}
# The parameters that an estimator passes; make_bert.py adds what the classic asks for.
PARAMS = {"batch_size": 4}
ARGUMENTS = {
    "init_checkpoint": None, "learning_rate": 0.1, "num_train_steps": 10, "num_warmup_steps": 2}
MODES = {
    "run_classifier": ["eval", "infer"],  # in training it has dropout of its own
    "run_squad": ["train", "infer"], "run_pretraining": ["train", "eval"],
}


def numbers(name, *sizes, below):
    seed = zlib.crc32(name.encode()) % 2**31
    return tf.constant(np.random.RandomState(seed).randint(below, size=sizes).astype("int32"))


def features_of(program):
    found = {
        "input_ids": numbers("ids", 4, 12, below=40), "input_mask": numbers("mask", 4, 12, below=2),
        "segment_ids": numbers("segments", 4, 12, below=2)}
    if program == "run_classifier":
        found["label_ids"] = numbers("labels", 4, below=3)
        found["is_real_example"] = tf.constant([1, 1, 0, 1])
    elif program == "run_squad":
        found["unique_ids"] = tf.range(4)
        found["start_positions"] = numbers("start", 4, below=12)
        found["end_positions"] = tf.constant([3, 11, 12, 0])  # one is out of range
    else:
        found["masked_lm_positions"] = numbers("positions", 4, 3, below=12)
        found["masked_lm_ids"] = numbers("masked", 4, 3, below=40)
        found["masked_lm_weights"] = tf.cast(numbers("weights", 4, 3, below=2), tf.float32)
        found["next_sentence_labels"] = numbers("next", 4, 1, below=2)
    return found


def fill(session):
    for v in tf.global_variables():
        if v.dtype.base_dtype == tf.float32 and "adam" not in v.op.name:
            r = np.random.RandomState(zlib.crc32(v.op.name.encode()) % 2**31)
            session.run(tf.assign(v, r.normal(size=v.shape.as_list()).astype("float32") * 0.5))


def metrics_of(spec):
    if not getattr(spec, "eval_metrics", None):
        return {}
    fn, tensors = spec.eval_metrics
    return fn(**tensors) if isinstance(tensors, dict) else fn(*tensors)


def of_model_fn(program, directory):
    """Losses, metrics and predictions of a model function, with seeded weights."""
    import importlib

    from mesh_tensorflow.bert import bert
    module = importlib.import_module(f"mesh_tensorflow.bert.{program}")
    flags = tf.flags.FLAGS
    kept = {name: getattr(flags, name) for name in ("mesh_shape", "layout", "output_dir")}
    flags.mesh_shape, flags.layout, flags.output_dir = "batch:1", "batch:batch", directory
    arguments = dict(ARGUMENTS, bert_config=bert.BertConfig.from_dict(CONFIG))
    if program != "run_pretraining":
        arguments["use_tpu"] = True
    if program == "run_classifier":
        arguments["num_labels"] = 3
    found = {}
    for mode in MODES[program]:
        with tf.Graph().as_default():
            tf.train.get_or_create_global_step()
            features = features_of(program)
            spec = module.model_fn_builder(**arguments)(features, None, mode, PARAMS)
            metrics = metrics_of(spec)
            fetches = dict(spec.predictions or {})
            if spec.loss is not None:
                fetches["loss"] = spec.loss
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                session.run(tf.local_variables_initializer())
                fill(session)
                values = session.run(fetches)
                session.run([update for _, update in metrics.values()])
                values.update(session.run({name: value for name, (value, _) in metrics.items()}))
            found[mode] = {name: np.asarray(value).tolist() for name, value in values.items()}
            found[mode + "/variables"] = sorted(
                [v.op.name, v.shape.as_list()] for v in tf.global_variables())
    for name, value in kept.items():
        setattr(flags, name, value)
    return found


PARTS = {
    "tokenization": tokenized, "classifier": classified, "squad": answered,
    "run_classifier": lambda directory: of_model_fn("run_classifier", directory),
    "run_squad": lambda directory: of_model_fn("run_squad", directory),
    "run_pretraining": lambda directory: of_model_fn("run_pretraining", directory),
}
