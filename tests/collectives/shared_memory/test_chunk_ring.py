from __future__ import annotations

from collections.abc import Callable

from evener.collectives.shared_memory.chunk_ring import Chunk, run

STAGES = ("copy in", "add up", "copy out")


def order_of(chunks: int) -> list[tuple[str, int]]:
    """The stages and the numbers of the chunks, as they are worked on."""
    done: list[tuple[str, int]] = []

    def stage(name: str) -> Callable[[Chunk], None]:
        return lambda chunk: done.append((name, chunk.number))

    run([Chunk(number, [], [], [], []) for number in range(chunks)], *map(stage, STAGES))
    return done


def test_chunks_go_through_the_stages_as_drawn() -> None:
    lines = [line.strip() for line in (run.__doc__ or "").splitlines()]
    rows = {name: next(line for line in lines if line.startswith(name)) for name in STAGES}
    drawn = [
        (name, int(cell[1:]))
        for column in range(12, 42, 6)
        for name in STAGES
        if (cell := rows[name][column : column + 6].strip())
    ]
    assert len(drawn) == 12
    assert order_of(5)[: len(drawn)] == drawn


def test_every_chunk_ends_however_few_there_are() -> None:
    assert order_of(0) == []
    assert order_of(1) == [(name, 0) for name in STAGES]
    assert order_of(2)[-1] == ("copy out", 1)
    assert len(order_of(2)) == 6
