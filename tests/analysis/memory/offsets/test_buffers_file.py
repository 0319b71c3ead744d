"""Files of buffers: what is written is read again, and what is wrong is said with its line."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from irpar.analysis.memory.offsets.buffers_file import BuffersFileError, read_buffers, write_buffers
from irpar.analysis.memory.offsets.lifetimes import Lifetime
from irpar.sharding import IrparError

from .drawn import LIFETIMES


def written(folder: Path, text: str) -> Path:
    (folder / "buffers.csv").write_text(text)
    return folder / "buffers.csv"


def test_upper_is_not_in_it(tmp_path: Path) -> None:
    path = written(tmp_path, "id,lower,upper,size\nb1,0,3,4\n\nb2, 3 ,9,0\n")
    assert read_buffers(path) == [Lifetime("b1", 4, 0, 2), Lifetime("b2", 0, 3, 8)]


@pytest.mark.parametrize(
    "text",
    [
        "size,upper,more,lower,id\n4,3,,0,b1\n",
        "buffer,start,end,size\r\nb1,0,3,4\r\n",
        "\ufeffID,lower,upper,size\nb1,0,3,4",
    ],
)
def test_columns_in_any_order(tmp_path: Path, text: str) -> None:
    assert read_buffers(written(tmp_path, text)) == [Lifetime("b1", 4, 0, 2)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LIFETIMES)
def test_what_is_written_is_read(tmp_path: Path, drawn: list[tuple[int, int, int]]) -> None:
    held = [Lifetime(f"a, {key}", nbytes, first, first + more) for key, (nbytes, first, more) in enumerate(drawn)]
    write_buffers(tmp_path / "out.csv", held, {one.key: 64 * number for number, one in enumerate(held)})
    assert read_buffers(tmp_path / "out.csv") == held
    lines = (tmp_path / "out.csv").read_text().splitlines()
    assert lines[0] == "id,lower,upper,size,offset"
    assert [line.rsplit(",", 1)[1] for line in lines[1:]] == [str(64 * number) for number in range(len(held))]


BAD = [
    ("", 1, "there is no line of names, such as id,lower,upper,size"),
    ("a,b,c\n", 1, "no column is called id"),
    ("id,lower,upper,size,size\n", 1, "two columns are called size"),
    ("id,lower,upper,size\nb,0,3\n", 2, "3 columns, and the line of names has 4"),
    ("id,lower,upper,size\nb,0,3,4,5\n", 2, "5 columns, and the line of names has 4"),
    ("id,lower,upper,size,gaps\nb,0,3,4,\nc,0,3,4,1-2\n", 3, "there are gaps, steps in which the buffer is not held"),
    ("id,lower,upper,size\n\nb,0,3,x\n", 3, 'size is "x", not a whole number'),
    ("id,lower,upper,size\nb,-1,3,4\n", 2, 'lower is "-1", not a whole number'),
    ("id,lower,upper,size\nb,0,1.5,4\n", 2, 'upper is "1.5", not a whole number'),
    ("id,lower,upper,size\nb,3,3,4\n", 2, "upper is 3, which must be greater than lower, 3"),
    ("id,lower,upper,size\n,0,3,4\n", 2, "the id is empty"),
    ("id,lower,upper,size\nb,0,3,4\nb,0,3,4\n", 3, 'there is a buffer "b" already'),
    (f"id,lower,upper,size\nb,0,3,{2**50}\nc,0,3,1\n", 3, "the sizes so far add up to"),
    (f"id,lower,upper,size\nb,0,{2**51},1\n", 2, "upper is 2251799813685248, more than"),
    ("id,lower,upper,size\nb,0,3," + "9" * 5000 + "\n", 2, "not a whole number"),
    ('id,lower,upper,size\n"b,0,3,4\n', 2, "unexpected end of data"),
]


@pytest.mark.parametrize(("text", "line", "told"), BAD, ids=[told for _, _, told in BAD])
def test_what_is_wrong(tmp_path: Path, text: str, line: int, told: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(BuffersFileError) as caught:
        read_buffers(path)
    assert told in str(caught.value)
    assert f"{path}, line {line}" in str(caught.value)
    assert "\n  do: " in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(BuffersFileError, match="cannot read the buffers: No such file"):
        read_buffers(tmp_path / "none.csv")
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BuffersFileError, match="not text in UTF-8"):
        read_buffers(tmp_path / "b.csv")
    with pytest.raises(IrparError, match="cannot write the buffers"):
        write_buffers(tmp_path / "none" / "b.csv", [], {})
