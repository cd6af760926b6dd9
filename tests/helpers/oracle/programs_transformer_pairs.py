"""Programs: encoders with decoders, students with teachers, and what gin makes of them."""

import gin
import tensorflow.compat.v1 as tf

from helpers.oracle.model_harness import (
    CHANNELS,
    PACKED,
    POSITIONS,
    ROWS,
    SUBLAYERS,
    Mix,
    bitransformer,
    given,
    outcome,
    sequence_to_sequence,
    stack,
    unitransformer,
)
from helpers.oracle.oracle_runner import table
from mesh_tensorflow.transformer import transformer as T

TRANSFORMER_PAIRS, model = table("batch:x,vocab:y", gradients=False, tolerance=1e-4)


@model(CHANNELS, "batch:x,vocab:y", "batch:x,length:y")
def bitransformer_shared(p):
    return sequence_to_sequence(p, bitransformer())


@model()
def bitransformer_apart(p):
    decoder = {"input_vocab_size": 20, "output_vocab_size": 20, "max_length": 12}
    decoder["shared_embedding_and_softmax_weights"] = False
    return sequence_to_sequence(p, bitransformer(shared_embedding=False, decoder=decoder))


@model(CHANNELS)
def bitransformer_packed(p):
    packed, positions = given(p, PACKED), given(p, POSITIONS)
    call = {
        "encoder_sequence_id": packed, "decoder_sequence_id": packed,
        "decoder_subsequence_id": positions, "encoder_position": positions,
        "decoder_position": positions, "mode": "eval", "num_microbatches": 2,
    }
    return sequence_to_sequence(p, bitransformer(), call, target_rows=ROWS)


@model(CHANNELS)
def bitransformer_one_sinusoid(p):
    return sequence_to_sequence(p, bitransformer(encoder={"sinusoid_positional_embedding": True}))


@model(CHANNELS)
def bitransformer_sinusoids(p):
    sides = {"sinusoid_positional_embedding": True}
    return sequence_to_sequence(p, bitransformer(encoder=sides, decoder=sides))


@model("ensemble:x,batch:y")
def bitransformer_ensemble(p):
    return sequence_to_sequence(p, bitransformer(encoder={"ensemble": 2}, decoder={"ensemble": 2}))


@model()
def bitransformer_layer_losses(p):
    layers = [(Mix, {"loss": 0.5})]
    sides = [{"layer_stack": stack(layers=layers)} for _ in range(2)]
    return sequence_to_sequence(p, bitransformer(encoder=sides[0], decoder=sides[1]))


def distillation(p, call=None, step=1, **kwargs):
    tf.train.get_or_create_global_step()
    p.feeds["global_step"] = step
    student = bitransformer(encoder={"layer_stack": stack(num_layers=1)})
    pair = T.StudentTeacher(student, bitransformer(), **kwargs)
    return sequence_to_sequence(p, pair, call)


@model(CHANNELS)
def student_teacher(p):
    return distillation(p, temperature=2.0, fraction_soft=0.7)


@model()
def student_teacher_before(p):
    return distillation(p, temperature=2.0, fraction_soft=0.7, distill_start_step=1)


@model()
def student_without_teacher(p):
    return distillation(p, fraction_soft=0.0, distill_start_step=1)


@model()
def student_teacher_microbatches(p):
    call = {"num_microbatches": 2, "mode": "eval"}
    return distillation(p, call, step=5, temperature=1.5, fraction_soft=1.0, distill_start_step=3)


@model()
def student_of_language_model(p):
    targets = p.input("targets", ROWS, 16) - 2
    p.feeds["global_step"] = 4
    tf.train.get_or_create_global_step()
    pair = T.StudentTeacher(unitransformer(), unitransformer(), 1.0, 0.25)
    logits, loss = pair.call_simple(T.autoregressive_inputs(targets), targets, True)
    return outcome(p, logits, loss)


BINDINGS = """
make_layer_stack.layer_stack_cls = @mix_stack
make_layer_stack.num_layers = 1
encoder/make_layer_stack.num_layers = 2
teacher/decoder/make_layer_stack.num_layers = 2
transformer.Unitransformer.d_model = 8
Unitransformer.max_length = 8
Unitransformer.vocab_divisor = 16
decoder/Unitransformer.z_loss = 0.01
Bitransformer.shared_embedding = False
StudentTeacher.temperature = 1.0
StudentTeacher.fraction_soft = 0.5
"""


def mix_stack(layers):
    return T.LayerStack(layers, **SUBLAYERS)


def configured(make):
    """Returns what a function makes with the bindings above, and clears them."""
    gin.enter_interactive_mode()
    try:
        gin.external_configurable(mix_stack, module="oracle_programs")
        gin.parse_config(BINDINGS)
        gin.bind_parameter("make_layer_stack.layers", [Mix])
        return make()
    finally:
        gin.clear_config()
        gin.exit_interactive_mode()


@model()
def made_by_gin(p):
    made = configured(lambda: T.make_bitransformer(input_vocab_size=14, output_vocab_size=20))
    return sequence_to_sequence(p, made)


@model()
def pair_made_by_gin(p):
    p.feeds["global_step"] = 1
    tf.train.get_or_create_global_step()
    return sequence_to_sequence(p, configured(lambda: T.make_bi_student_teacher(14, 20)))
