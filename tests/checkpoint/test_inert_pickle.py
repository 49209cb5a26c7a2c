from __future__ import annotations

import pickle

import pytest
import torch

from evener.checkpoint.inert_pickle import Made, PickledName, read

READER = b"ctorch.distributed.checkpoint.filesystem\nFileSystemReader\n"
SIZE = b"ctorch\nSize\n"


def test_plain_values_come_as_they_are() -> None:
    value = {
        "a": [1, -(2**40), 300, 70_000, 1.5],
        "b": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
        "c": None,
    }
    value |= {"d": True, "e": False, "text" * 200: "é"}
    for protocol in (2, 3, 4, 5):
        assert read(pickle.dumps(value, protocol)) == value


def test_objects_come_as_pictures() -> None:
    made = read(pickle.dumps(torch.Size([3, 4])))
    assert isinstance(made, Made)
    assert (made.kind, made.arguments) == (PickledName("torch", "Size"), ((3, 4),))
    assert read(pickle.dumps(torch.float16)) == PickledName("torch", "float16")


def test_one_object_that_is_named_twice_stays_one() -> None:
    one = [1]
    again = read(pickle.dumps([one, one]))
    assert again[0] is again[1]


@pytest.mark.parametrize(
    "opcodes",
    [
        pytest.param(READER + b"N}X\x01\x00\x00\x00aK\x01s\x86b.", id="BUILD changes a class"),
        pytest.param(READER + b"X\x01\x00\x00\x00aK\x01s.", id="SETITEM on a class"),
        pytest.param(READER + b"(X\x01\x00\x00\x00aK\x01u.", id="SETITEMS on a class"),
        pytest.param(SIZE + b")R(X\x01\x00\x00\x00aK\x01u.", id="SETITEMS on an object"),
        pytest.param(READER + b"K\x01a.", id="APPEND to a class"),
        pytest.param(READER + b"(K\x01e.", id="APPENDS to a class"),
        pytest.param(SIZE + b"h\x00R.", id="REDUCE with what is not in the memo"),
        pytest.param(SIZE + b"q\x00h\x00)R\x81.", id="NEWOBJ of an object"),
        pytest.param(SIZE + b")R)R.", id="REDUCE of an object"),
        pytest.param(b"(cos\nsystem\nX\x04\x00\x00\x00trueo.", id="OBJ"),
        pytest.param(b"(X\x04\x00\x00\x00trueios\nsystem\n.", id="INST"),
        pytest.param(b"\x82\x01.", id="EXT1"),
        pytest.param(b"\x83\x01\x00.", id="EXT2"),
        pytest.param(b"\x84\x01\x00\x00\x00.", id="EXT4"),
        pytest.param(b"Pid\n.", id="PERSID"),
        pytest.param(b"K\x01Q.", id="BINPERSID"),
        pytest.param(SIZE + b"))}\x92.", id="NEWOBJ_EX"),
        pytest.param(b"\x97.", id="NEXT_BUFFER"),
        pytest.param(b"K\x01K\x02\x93.", id="STACK_GLOBAL of numbers"),
        pytest.param(b"K\x01K\x02.", id="two values"),
        pytest.param(b".", id="no value"),
        pytest.param(b"", id="empty"),
        pytest.param(b"K\x01", id="no end"),
        pytest.param(b"u.", id="no mark"),
        pytest.param(b"}(K\x01u.", id="a key without a value"),
        pytest.param(b"}]K\x01s.", id="a key that is a list"),
        pytest.param(b"})K\x01s.", id="a key that is a tuple"),
        pytest.param(b"}(K\x01K\x02NK\x01u.", id="the second key is none"),
        pytest.param(b"}" + b")" + b"\x85" * 1_000_000 + b"K\x01s.", id="a key of a million levels"),
        pytest.param(b"})" + b"q\x01h\x01h\x01\x86" * 60 + b"K\x01s.", id="a key of 2**60 parts"),
        pytest.param(b")" + b"\x85" * 5 + b".", id="tuples of six levels"),
    ],
)
def test_whatever_else_a_pickle_can_do_is_refused(opcodes: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError):
        read(b"\x80\x04" + opcodes if opcodes else b"")
