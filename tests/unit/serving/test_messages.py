"""The messages are those of the client's library, and tensors are read as they were written."""

import numpy as np
import pytest
from running import pass_message

from nemo_rl.serving.interfaces import ModelLimits, PassResult, RequestError
from nemo_rl.serving.wire.messages import (
    DTYPES,
    MESSAGES,
    PACKAGE,
    ForwardBackwardRequest,
    file_descriptor,
    parsed,
)
from nemo_rl.serving.wire.passes import read_pass, write_output
from nemo_rl.serving.wire.tensors import read_tensor

pytestmark = pytest.mark.fast
LIMITS = ModelLimits(max_context=16, vocab_size=10, eos_ids=(2,))


def described(message, package):
    """Fields of a message as plain values."""
    of = [each.name for each in message.oneof_decl]
    fields = {
        each.number: (
            each.name,
            each.label,
            each.type,
            each.type_name.removeprefix(f".{package}."),
            of[each.oneof_index] if each.HasField("oneof_index") else None,
            each.proto3_optional,
        )
        for each in message.field
    }
    return fields, {each.name: described(each, package)[0] for each in message.nested_type}


def test_messages_are_those_of_the_library():
    from_library = pytest.importorskip("tinker.proto.tinker_public_pb2")
    from google.protobuf import descriptor_pb2

    theirs = descriptor_pb2.FileDescriptorProto()
    from_library.DESCRIPTOR.CopyToProto(theirs)
    own = file_descriptor()
    expected = {each.name: described(each, theirs.package) for each in theirs.message_type if each.name in MESSAGES}
    assert {each.name: described(each, PACKAGE) for each in own.message_type} == expected
    enums = {each.name: [(value.name, value.number) for value in each.value] for each in theirs.enum_type}
    assert {each.name: [(value.name, value.number) for value in each.value] for each in own.enum_type} == enums


def test_only_messages_that_json_replaces_are_missing():
    from_library = pytest.importorskip("tinker.proto.tinker_public_pb2")
    missing = set(from_library.DESCRIPTOR.message_types_by_name) - set(MESSAGES)
    assert missing == {"SamplingParams", "StopStrings", "StopTokens"}


def test_a_request_of_the_library_is_read():
    pytest.importorskip("tinker")
    from tinker import types
    from tinker.proto.request_conv import forward_backward_request_to_proto

    sparse = types.TensorData(
        data=[3, 4, 5], dtype="int64", shape=[2, 3], sparse_crow_indices=[0, 1, 3], sparse_col_indices=[2, 0, 1]
    )
    weights = types.TensorData(data=[0.5, 1.0, 2.0, 0.0, 1.0, -1.5], dtype="float32", shape=[2, 3])
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([7]).append_int(8),
        loss_fn_inputs={"target_tokens": sparse, "weights": weights},
    )
    request = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(data=[datum], loss_fn="cross_entropy"), model_id="m", seq_id=3
    )
    call = read_pass(
        parsed(ForwardBackwardRequest, forward_backward_request_to_proto(request).SerializeToString()), LIMITS, 100
    )
    (read,) = call.data
    assert read.token_ids.tolist() == [7, 8]
    assert read.inputs["target_tokens"].tolist() == [[0, 0, 3], [4, 5, 0]]
    assert read.inputs["weights"].tolist() == [[0.5, 1.0, 2.0], [0.0, 1.0, -1.5]]


def test_the_library_reads_outputs_of_different_widths():
    pytest.importorskip("tinker")
    from tinker.proto.response_conv import deserialize_forward_backward_output

    arrays = [np.arange(3), np.arange(2), np.arange(6).reshape(3, 2), np.arange(4).reshape(2, 2), np.arange(1)]
    outputs = [{"logprobs": array.astype(np.float32)} for array in arrays]
    read = deserialize_forward_backward_output(write_output(PassResult(outputs, {"loss:sum": 1.5})))
    assert read.metrics == {"loss:sum": 1.5}
    for output, array in zip(read.loss_fn_outputs, arrays, strict=True):
        found = output["logprobs"]
        assert found.shape == list(array.shape)
        assert found.to_numpy().tolist() == array.tolist()


def test_bfloat16_becomes_float32():
    message = pass_message("m", 1, [[1, 2, 3]]).data[0].loss_fn_inputs["weights"]
    message.dtype = DTYPES["bfloat16"]
    message.dense = np.array([0x3FC0, 0xC000], "<u2").tobytes()  # 1.5 and -2
    assert read_tensor(message, "weights").tolist() == [1.5, -2.0]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda datum: datum.loss_fn_inputs["weights"].shape.append(2), "values, but its shape"),
        (lambda datum: datum.loss_fn_inputs["weights"].shape.__setitem__(0, -1), "sizes must be 0 or more"),
        (lambda datum: setattr(datum.loss_fn_inputs["weights"], "dense", b"123"), "no multiple of 4"),
        (lambda datum: setattr(datum.loss_fn_inputs["weights"], "dtype", 9), "type number 9"),
        (lambda datum: setattr(datum.model_input[0].encoded_text, "tokens", b"12"), "no multiple of 4"),
        (lambda datum: datum.loss_fn_inputs["target_tokens"].sparse_csr.SetInParent(), "two dimensions"),
    ],
)
def test_tensors_that_contradict_themselves_are_refused(change, text):
    message = pass_message("m", 1, [[1, 2, 3]])
    change(message.data[0])
    with pytest.raises(RequestError, match=text):
        read_pass(message, LIMITS, 100)
