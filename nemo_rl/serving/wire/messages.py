"""Define the protobuf messages of forward_backward and asample.

The messages are in a descriptor pool of their own, so a process may also load the client's library, which defines
messages of the same names. Invariant: numbers, names and types of the fields are those of the client (SDK 0.38).
"""

from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from nemo_rl.serving.interfaces import RequestError

PACKAGE = "nemo_rl.serving"
"""Package of the messages in the descriptor pool."""

STOP_REASONS: Mapping[str, int] = {"stop": 0, "length": 1}
"""Numbers of the reasons for the end of a response."""

DTYPES: Mapping[str, int] = {"unspecified": 0, "float32": 1, "int64": 2, "int32": 3, "bfloat16": 4}
"""Numbers of the types of tensors."""

_ENUMS: Mapping[str, tuple[str, ...]] = {
    "StopReason": ("STOP_REASON_STOP", "STOP_REASON_LENGTH"),
    "DType": ("DTYPE_UNSPECIFIED", "DTYPE_FLOAT32", "DTYPE_INT64", "DTYPE_INT32", "DTYPE_BFLOAT16"),
}

MESSAGES: Mapping[str, str] = {
    "SampleResponse": """1 sequences SampledSequence*; 2 prompt_logprobs bytes?; 3 topk_prompt_logprobs TopkLogprobs?;
        4 prompt_cache_hit_tokens int32; 5 target_prompt_logprobs Tensor?; 6 prompt_alt_tokens PromptAltTokens?""",
    "PromptAltTokens": "1 tokens Tensor; 2 logprobs Tensor",
    "SampledSequence": """1 stop_reason StopReason; 2 tokens bytes; 3 logprobs bytes?;
        4 topk_sampled_logprobs TopkLogprobs?""",
    "TopkLogprobs": "1 token_ids bytes; 2 logprobs bytes; 3 k uint32; 4 length uint32",
    "SparseCsr": "1 values bytes; 2 crow_indices bytes; 3 col_indices bytes",
    "Tensor": "1 dense bytes|encoding; 2 sparse_csr SparseCsr|encoding; 3 dtype DType; 4 shape int64*",
    "BatchedTensor": "1 data bytes; 2 offsets bytes; 3 dtype DType; 4 trailing_shape int64*",
    "ArrayRecord": "1 type_tag string; 2 fields {BatchedTensor}; 3 num_datums int64",
    "ForwardBackwardOutput": "1 loss_fn_output_type string; 2 loss_fn_outputs ArrayRecord*; 3 metrics {double}",
    "ForwardBackwardRequest": """1 model_id string; 2 seq_id int32; 3 data Datum*; 4 loss_fn string;
        5 loss_fn_config {double}; 6 forward_only bool; 7 loss_fn_config_v2 {LossConfigValue}""",
    "LossConfigValue": "1 number double|value; 2 text string|value",
    "Datum": """1 model_input Chunk*; 2 loss_fn_inputs {Tensor}; 3 model_input_spans ProvenanceSpan*;
        4 loss_fn_input_spans ProvenanceSpan*""",
    "ProvenanceSpan": "1 prompt_tokens PromptProvenanceSpan|span; 2 sampled_tokens SampledProvenanceSpan|span",
    "PromptProvenanceSpan": "1 sequence_id string; 2 offset int64; 3 length int64",
    "SampledProvenanceSpan": "1 sequence_id string; 2 offset int64; 3 length int64",
    "Chunk": "1 encoded_text EncodedTextChunk|chunk; 2 image ImageChunk|chunk; 3 dmel DmelChunk|chunk",
    "EncodedTextChunk": "1 tokens bytes",
    "ImageChunk": """1 data bytes; 2 format string; 3 expected_tokens int32?;
        4 override_dimensions ImageDimensions?""",
    "ImageDimensions": "1 width uint32; 2 height uint32",
    "DmelChunk": "1 dmel bytes",
}
"""Fields of each message: number, name and type. `*` marks a repeated field, `?` one that may be absent, `{}` a map
from texts, and `|name` a member of the oneof of that name."""

_Field = descriptor_pb2.FieldDescriptorProto


def _set_type(field: Any, kind: str) -> None:
    """Set the type of a field: a scalar, an enum, or a message of this file."""
    if kind in _ENUMS:
        field.type, field.type_name = _Field.TYPE_ENUM, f".{PACKAGE}.{kind}"
    elif kind in MESSAGES:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
    else:
        field.type = getattr(_Field, f"TYPE_{kind.upper()}")


def _add_field(message: Any, text: str) -> None:
    """Add a field that is described as in `MESSAGES`."""
    number, name, kind = text.split()
    field = message.field.add(name=name, number=int(number), label=_Field.LABEL_OPTIONAL)
    if kind.startswith("{"):
        entry = message.nested_type.add(name="".join(part.capitalize() for part in name.split("_")) + "Entry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_STRING)
        _set_type(entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL), kind[1:-1])
        field.label, field.type = _Field.LABEL_REPEATED, _Field.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{message.name}.{entry.name}"
        return
    kind, _, member_of = kind.partition("|")
    if member_of:
        known = [each.name for each in message.oneof_decl]
        if member_of not in known:
            message.oneof_decl.add(name=member_of)
        field.oneof_index = [each.name for each in message.oneof_decl].index(member_of)
    if kind.endswith("*"):
        field.label = _Field.LABEL_REPEATED
    if kind.endswith("?"):
        field.proto3_optional = True
        field.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")
    _set_type(field, kind.rstrip("*?"))


def file_descriptor() -> descriptor_pb2.FileDescriptorProto:
    """Return the description of all messages."""
    file = descriptor_pb2.FileDescriptorProto(name="nemo_rl_serving.proto", package=PACKAGE, syntax="proto3")
    for name, values in _ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for text in fields.split(";"):
            _add_field(message, text)
    return file


_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(file_descriptor())


def _class_of(name: str) -> Any:
    """Return the class of a message."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


ForwardBackwardRequest = _class_of("ForwardBackwardRequest")
ForwardBackwardOutput = _class_of("ForwardBackwardOutput")
SampleResponse = _class_of("SampleResponse")


def parsed(kind: Any, body: bytes) -> Any:
    """Parse a message.

    Args:
        kind: class of the message.
        body: its bytes.

    Raises:
        RequestError: the bytes are no such message.
    """
    message = kind()
    try:
        message.ParseFromString(body)
    except (DecodeError, ValueError) as error:  # ValueError: a text that is not UTF-8
        raise RequestError(f"The body is no valid protobuf message {kind.DESCRIPTOR.name}: {error}.") from error
    return message
