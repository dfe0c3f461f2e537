"""The picture of docs/architecture.md: which room imports which.

`python -m tests.room_imports` draws docs/rooms.svg.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pipeline.core.pages.page import Drawing
from tests.test_layering import PUBLIC, ROOMS, imports, modules, room_of

PICTURE = Path(__file__).parents[1] / "docs" / "rooms.svg"
CELL = 30
LEFT = 110
TOP = 84


def list_imported_rooms() -> Mapping[str, frozenset[str]]:
    """The rooms that each room imports from, besides itself."""
    rooms: dict[str, set[str]] = {room: set() for room in ROOMS}
    for module in modules():
        if module not in PUBLIC:
            room = room_of(module)
            rooms[room] |= {room_of(name) for name in imports(module)} - {room}
    return {room: frozenset(imported) for room, imported in rooms.items()}


def draw_rooms(rooms: Mapping[str, frozenset[str]]) -> str:
    """The text of the picture: a row for each room, a dot for each room that it imports from."""
    order = list(rooms)[::-1]
    size = CELL * len(order)
    picture = Drawing(LEFT + size + 20, TOP + size + 10, "Which room imports from which")
    for number, room in enumerate(order):
        middle = CELL * (number + 0.5)
        picture.add("text", "ink end", room, x=LEFT - 12, y=TOP + middle + 4)
        x = LEFT + middle
        turn = f"rotate(-55 {x:.6g} {TOP - 10})"
        picture.add("text", "ink", room, x=x, y=TOP - 10, transform=turn)
        for column, other in enumerate(order):
            x, y = LEFT + CELL * column, TOP + CELL * number
            picture.add("rect", "gap", x=x + 1, y=y + 1, width=CELL - 2, height=CELL - 2)
            if other in rooms[room]:
                picture.add(
                    "circle",
                    "blue",
                    tip=f"{room} imports {other}",
                    cx=x + CELL / 2,
                    cy=y + CELL / 2,
                    r=6,
                )
    return picture.to_file_text()


if __name__ == "__main__":
    PICTURE.write_text(draw_rooms(list_imported_rooms()), encoding="utf-8")
    print(PICTURE)
