"""All orders of looks, polls and writes: a common moment of the nodes is found if they rest, and never made up.

A node's look sees its folder at once, and stores what it sees as a part in its next look, if nothing has changed. The
driver's poll brings the number of the poll to the node at one time, and the node's status to the driver at a later one:
answers may overtake each other, or be lost.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from itertools import product

import pytest

from ray_on_ecs.run.files.moment import Moments
from ray_on_ecs.run.group import FilesStatus


class Node:
    """A node's folder, whose content is a number that writes make greater."""

    def __init__(self) -> None:
        self.content = 0
        self.seen = 0  # in the last look
        self.poll = 0  # the last one that has arrived
        self.looking_since: int | None = None
        self.status = FilesStatus(part="0")
        self.answer: FilesStatus | None = None  # under way

    def begin_look(self) -> None:
        self.looking_since = self.poll

    def end_look(self) -> None:
        """Scan the folder: NodeFiles has read the number of the poll before."""
        assert self.looking_since is not None
        before, self.seen = self.seen, self.content
        part, part_state = self.status.part, self.status.part_state
        if self.seen == before:  # it is quiet
            part, part_state = str(self.seen), self.seen
        checked = self.looking_since if self.seen == part_state else self.status.checked
        self.status = FilesStatus(state=self.seen, part=part, part_state=part_state, checked=checked)
        self.looking_since = None


class World:
    """Nodes and their driver; the contents of all nodes at each moment so far."""

    def __init__(self, count: int) -> None:
        self.nodes = [Node() for _ in range(count)]
        self.moments = Moments()
        self.polls = 0
        self.past = {(0,) * count}

    @property
    def key(self) -> str:
        nodes = [vars(node) for node in self.nodes]
        return repr((nodes, vars(self.moments), self.polls, sorted(self.past)))

    def can(self, event: str, node: int) -> bool:
        of = self.nodes[node]
        return {"end": of.looking_since is not None, "hear": of.answer is not None}.get(event, True)

    def do(self, event: str, node: int) -> None:
        of, count = self.nodes[node], len(self.nodes)
        if event == "write":
            of.content += 1
            self.past.add(tuple(node.content for node in self.nodes))
        elif event == "begin":
            of.begin_look()
        elif event == "end":
            of.end_look()
        elif event == "poll":  # an answer that is still under way is lost
            self.polls += 1
            of.poll, of.answer = self.polls, of.status
        elif of.answer:
            self.moments.hear(node, of.answer, self.polls + 1)
            of.answer = None
            common = self.moments.common(count)
            assert not common or tuple(int(part) for part in common.values()) in self.past

    def rest(self) -> None:
        """Let nothing change for some looks and polls."""
        for event, node in product(("begin", "end", "poll", "hear") * 4, range(len(self.nodes))):
            self.do(event, node)


EVENTS = ("write", "begin", "end", "poll", "hear")


def orders(world: World, length: int) -> Iterable[World]:
    """Return the world after all orders of so many events that can happen; equal ones once."""
    found = {world.key: world}
    for _ in range(length):
        before, found = found, {}
        for each in before.values():
            content = pickle.dumps(each)
            for event, node in product(EVENTS, range(len(world.nodes))):
                if each.can(event, node):
                    after = pickle.loads(content)
                    after.do(event, node)
                    found[after.key] = after
    return found.values()


@pytest.mark.parametrize(("count", "length"), [(2, 5), (3, 4)])
@pytest.mark.parametrize("before", ["nothing", "a common part", "parts of different times"])
def test_common_moment_is_found_and_not_made_up(count: int, length: int, before: str) -> None:
    world = World(count)
    if before != "nothing":
        world.rest()
    if before == "parts of different times":
        for node in range(count):
            for event in ("write", "begin", "end", "begin", "end", "poll"):
                world.do(event, node)
    for after in orders(world, length):
        after.rest()
        contents = tuple(node.content for node in after.nodes)
        assert tuple(int(part) for part in after.moments.common(count).values()) == contents
        assert not after.moments.needs_look(count)
