"""What a decoder reads from its encoder goes by the names of the public arguments."""

import dataclasses
import inspect

import pytest

from mesh_tensorflow.transformer import transformer
from mesh_tensorflow.transformer.transformer._context import EncoderOutputs


@pytest.mark.parametrize(
    "function",
    [
        transformer.Context,
        transformer.Unitransformer.call_simple,
        transformer.Unitransformer.sample_autoregressive,
        transformer.Unitransformer.beam_search,
    ],
)
def test_fields_are_arguments(function):
    names = {field.name for field in dataclasses.fields(EncoderOutputs)}
    parameters = inspect.signature(function).parameters
    assert names <= set(parameters)
    assert all(parameters[name].default is None for name in names)


def test_arguments_are_the_fields_themselves():
    outputs, shared = [], {"embedding": object()}
    encoded = EncoderOutputs(encoder_layer_outputs=outputs, shared_params=shared)
    arguments = encoded.arguments()
    assert arguments["encoder_layer_outputs"] is outputs
    assert arguments["shared_params"] is shared
    assert {name for name, value in arguments.items() if value is None} == {
        "encoder_output", "encoder_sequence_id", "encoder_inputs",
    }  # fmt: skip
    with pytest.raises(dataclasses.FrozenInstanceError):
        encoded.encoder_output = outputs
