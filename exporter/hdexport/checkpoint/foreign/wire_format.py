"""Numbers and messages in the encoding of Protocol Buffers, of which a checkpoint's index needs a dozen fields."""

from __future__ import annotations

_VARINT, _FIXED_64, _LENGTH_DELIMITED, _FIXED_32 = 0, 1, 2, 5
_WIDTH_OF_FIXED = {_FIXED_64: 8, _FIXED_32: 4}
_MOST_VARINT_BYTES = 10


class DamagedError(ValueError):
    """Bytes do not follow their format; the message is half a sentence that says how."""


def read_varint(data: bytes, offset: int) -> tuple[int, int]:
    """A number of 1 to 10 bytes, and where the next one begins.

    Raises:
        DamagedError: the bytes end within the number, or the number has more.
    """
    value = 0
    for index, byte in enumerate(data[offset : offset + _MOST_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, offset + index + 1
    raise DamagedError("a number in it has no end")


def fields_of(message: bytes) -> dict[int, list[int | bytes]]:
    """Field number -> values in their order: numbers of varint and fixed fields, bytes of the others.

    Raises:
        DamagedError: the bytes are no message.
    """
    fields: dict[int, list[int | bytes]] = {}
    offset = 0
    while offset < len(message):
        key, offset = read_varint(message, offset)
        number, kind = key >> 3, key & 7
        value: int | bytes
        if kind == _VARINT:
            value, offset = read_varint(message, offset)
        elif kind in (_LENGTH_DELIMITED, *_WIDTH_OF_FIXED):
            size, offset = (
                read_varint(message, offset) if kind == _LENGTH_DELIMITED else (_WIDTH_OF_FIXED[kind], offset)
            )
            part = message[offset : offset + size]
            if len(part) < size:
                raise DamagedError("a record in it is cut off")
            value, offset = (part if kind == _LENGTH_DELIMITED else int.from_bytes(part, "little")), offset + size
        else:
            raise DamagedError(f"a record in it has a field of the unknown kind {kind}")
        fields.setdefault(number, []).append(value)
    return fields
