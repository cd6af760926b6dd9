"""Input data for transformers: text and records to features of fixed length, packed or padded.

An example is a dictionary of features, `inputs` and `targets` or `targets` alone, each a sequence
of ids. Id 0 is padding and id 1 ends a sequence (EOS). Training on packed examples needs two more
features for each: `<key>_segmentation`, the number of the example that a token belongs to (from 1,
with 0 for padding), and `<key>_position`, its position in that example.
"""

from mesh_tensorflow.transformer.dataset._features import (
    EvalDataset,
    encode_all_features,
    encode_dataset,
    ensure_dataset_eos,
    pack_dataset,
    pack_or_pad,
    pad_dataset_with_zeroed_out_examples,
    supervised_to_dict,
    trim_and_pad_dataset,
)
from mesh_tensorflow.transformer.dataset._sources import (
    make_text_line_dataset,
    packed_parallel_tsv_dataset,
    pretokenized_t2t_dataset,
    pretokenized_tfds_dataset,
    pretokenized_tfrecord_dataset,
    sample_from_text_line_datasets,
    simple_text_line_dataset,
    untokenized_tfds_dataset,
)

__all__ = [
    "EvalDataset",
    "encode_all_features",
    "encode_dataset",
    "ensure_dataset_eos",
    "make_text_line_dataset",
    "pack_dataset",
    "pack_or_pad",
    "packed_parallel_tsv_dataset",
    "pad_dataset_with_zeroed_out_examples",
    "pretokenized_t2t_dataset",
    "pretokenized_tfds_dataset",
    "pretokenized_tfrecord_dataset",
    "sample_from_text_line_datasets",
    "simple_text_line_dataset",
    "supervised_to_dict",
    "trim_and_pad_dataset",
    "untokenized_tfds_dataset",
]
