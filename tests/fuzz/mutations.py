"""Random changes: of bytes, of the words of a text, of plain data, and of protobuf messages field by field."""

import copy
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

NUMBERS = (
    *(0, 1, -1, 2, 3, 7, 8, 16, 17, 64, 127, 128, 255, 256, 1000, 65535, 65536, 65537, 10**6, 10**9, 10**12),
    *(2**31 - 1, 2**31, -(2**31), 2**32, 2**53, 2**62, 2**63 - 1, -(2**63), -2, -3, -8),
)
TEXTS = (
    *("", " ", "x", "y", "w", "?", "null", "../x", "/etc/passwd", "a\0b", "a\nb", '"', "\\", "%", "é", "\ud7ff", "😀"),
    *(
        "Relu",
        "MatMul",
        "If",
        "Loop",
        "irpar",
        "ai.onnx",
        "com.microsoft",
        "tp",
        "tp:(1)2",
        "batch",
        "2",
        "-1",
        "1e999",
    ),
    *("batch*seq", "ceil(batch/2)", "x" * 300, "*", "h.*", "[", "irpar.sharding", "sum", "f32", "i64"),
)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e308, -1e308, float("inf"), float("-inf"), float("nan"))


def change_bytes(random: Random, content: bytes) -> bytes:
    """Flip, insert, delete, repeat or cut off some bytes."""
    data = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 4, 16))):
        place = random.randrange(len(data) + 1)
        stop = min(len(data), place + random.choice((1, 2, 8, 64)))
        match random.randrange(6):
            case 0 if place < len(data):
                data[place] ^= 1 << random.randrange(8)
            case 1 if place < len(data):
                data[place] = random.choice((0, 1, 127, 128, 255, random.randrange(256)))
            case 2:
                data[place:place] = bytes(random.randrange(256) for _ in range(random.choice((1, 2, 8))))
            case 3:
                del data[place:stop]
            case 4:
                data[place:place] = data[place:stop]
            case _:
                if random.randrange(4) == 0:
                    del data[place:]
    return bytes(data)


_WORD = re.compile(r"\s+|[A-Za-z_][\w.]*|-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|\"(?:[^\"\\]|\\.)*\"|.", re.DOTALL)


def change_text(random: Random, text: str) -> str:
    """Remove, repeat, exchange or replace words of a text, or whole lines of it."""
    if random.randrange(4) == 0:
        return _change_list(random, text.splitlines(keepends=True), lambda line: change_text(random, line), "")
    words = _WORD.findall(text)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        text = _change_list(random, words, lambda word: _change_word(random, word), "")
        words = _WORD.findall(text)
    return text


def _change_list(random: Random, items: list[str], change: Callable[[str], str], between: str) -> str:
    if not items:
        return random.choice(TEXTS)
    place, other = random.randrange(len(items)), random.randrange(len(items))
    match random.randrange(7):
        case 0:
            del items[place]
        case 1:
            items.insert(place, items[other])
        case 2:
            items[place], items[other] = items[other], items[place]
        case 3:
            items[place] = items[other]
        case 4:
            items[place:place] = items[place : place + random.choice((1, 4, 30))]
        case _:
            items[place] = change(items[place]) if len(items[place]) < 200 else items[other]
    return between.join(items)


def _change_word(random: Random, word: str) -> str:
    match random.randrange(4):
        case 0:
            return str(random.choice(NUMBERS))
        case 1:
            return random.choice((*TEXTS, *"%@#$&*()[]{}<>,:;=!'|`~"))
        case 2:
            return f'"{random.choice(TEXTS)}"'
        case _:
            return change_bytes(random, word.encode()).decode("utf-8", "replace")


def change_data(random: Random, data: Any) -> Any:
    """A copy of plain data (what JSON holds) with one thing changed."""
    changed = [copy.deepcopy(data)]
    places = list(_places(changed))
    holder, key = random.choice(places)
    value = holder[key]
    other_holder, other_key = random.choice(places)
    match random.randrange(8):
        case 0 if holder is not changed:
            del holder[key]
        case 1:
            holder[key] = copy.deepcopy(other_holder[other_key])
        case 2 if isinstance(holder, list):
            holder.insert(key, copy.deepcopy(value))
        case 3 if isinstance(holder, dict):
            holder[random.choice(TEXTS)] = value
        case 4:
            holder[key] = random.choice(NUMBERS)
        case 5:
            holder[key] = random.choice(TEXTS)
        case 6:
            holder[key] = random.choice((None, True, [], {}, 1.5, [value], {"a": value}, *FLOATS))
        case _ if isinstance(value, int) and not isinstance(value, bool):
            holder[key] = value + random.choice((-1, 1, 2))
    return changed[0] if changed else None


def _places(value: Any) -> Any:
    """(holder, key) of everything below a list or table."""
    items = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    for key, inner in items:
        yield value, key
        yield from _places(inner)


# -- protobuf ---------------------------------------------------------------------------------------------------------


def change_message(random: Random, message: Message, donor: Message) -> None:
    """Change one field somewhere below a message; what is put in may come from another message, `donor`."""
    holders = list(_messages(message))
    # Every kind of message has the same chance, however many there are of it.
    kinds: dict[str, list[Message]] = {}
    for holder in holders:
        kinds.setdefault(holder.DESCRIPTOR.name, []).append(holder)
    target = random.choice(kinds[random.choice(sorted(kinds))])
    field = random.choice(target.DESCRIPTOR.fields if random.randrange(3) == 0 else _set_fields(target))
    if field.is_repeated:
        _change_repeated(random, target, field, donor)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        _change_inner(random, target, field, donor)
    elif random.randrange(4) == 0:
        target.ClearField(field.name)
    else:
        _set(target, field, _scalar(random, field, message))


def _messages(message: Message) -> Any:
    yield message
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in value if field.is_repeated else (value,):
                yield from _messages(inner)


def _set_fields(message: Message) -> Sequence[FieldDescriptor]:
    return [field for field, _ in message.ListFields()] or message.DESCRIPTOR.fields


def _change_repeated(random: Random, target: Message, field: FieldDescriptor, donor: Message) -> None:
    items = getattr(target, field.name)
    kept = [copy.deepcopy(item) for item in items]
    place = random.randrange(len(kept) + 1)
    is_message = field.type == FieldDescriptor.TYPE_MESSAGE
    match random.randrange(5):
        case 0 if kept:
            del kept[random.randrange(len(kept))]
        case 1 if kept:
            kept.insert(place, copy.deepcopy(random.choice(kept)))
        case 2 if len(kept) > 1:
            kept[random.randrange(len(kept))] = copy.deepcopy(random.choice(kept))
        case 3 if len(kept) > 1:
            random.shuffle(kept)
        case _ if is_message:
            found = [one for one in _messages(donor) if one.DESCRIPTOR.name == field.message_type.name]
            kept.insert(place, copy.deepcopy(random.choice(found)) if found else field.message_type._concrete_class())
        case _:
            value = _scalar(random, field, donor)
            if kept and random.randrange(2):
                kept[random.randrange(len(kept))] = value
            else:
                kept.insert(place, value)
    target.ClearField(field.name)
    try:
        getattr(target, field.name).extend(kept)
    except (ValueError, UnicodeEncodeError):  # a number or text that the field does not hold
        return


def _change_inner(random: Random, target: Message, field: FieldDescriptor, donor: Message) -> None:
    found = [one for one in _messages(donor) if one.DESCRIPTOR.name == field.message_type.name]
    if random.randrange(3) == 0 or not found:
        target.ClearField(field.name)
        if random.randrange(2):
            getattr(target, field.name).SetInParent()
    else:
        getattr(target, field.name).CopyFrom(copy.deepcopy(random.choice(found)))


def _scalar(random: Random, field: FieldDescriptor, donor: Message) -> Any:
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return random.choice([value.number for value in field.enum_type.values] + [99])
    if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return random.choice(FLOATS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return random.choice((b"", b"\0", b"\xff", b"SAME_UPPER", b"linear", b"sum", bytes(16), bytes(1000)))
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        names = [value for one in _messages(donor) for inner, value in one.ListFields() if inner.name == "name"]
        return random.choice((random.choice(names) if names else "x", random.choice(TEXTS)))
    if random.randrange(3) == 0:
        return random.choice(NUMBERS)
    return random.randrange(-2, 10)


def _set(target: Message, field: FieldDescriptor, value: Any) -> None:
    try:
        setattr(target, field.name, value)
    except (ValueError, UnicodeEncodeError, TypeError):  # a number or text that the field does not hold
        return
