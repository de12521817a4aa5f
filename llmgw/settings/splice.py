"""Pieces of a YAML text replaced, added and cut out, the rest of it as it is to the byte. Pure.

What comes out has to be read again and compared: a text may be written in ways that are not thought of here.
"""

from __future__ import annotations

from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from llmgw.settings.faults import Path
from llmgw.settings.yaml_text import STEP, flow, item_lines, nested, pair_lines, scalar, value_lines


class Spliced:
    """A document's text and the nodes in it."""

    def __init__(self, text: str) -> None:
        self._mark = "\ufeff" if text.startswith("\ufeff") else ""
        self._text = text.removeprefix("\ufeff")
        self._newline = "\r\n" if "\r\n" in text else "\n"
        self._root: Node | None = YAML(typ="safe", pure=True).compose(self._text)

    def put(self, keys: Path, new: Any) -> str:
        """The text with this value there."""
        if self._root is None or _is_null(self._root):
            return self._mark + self._ended() + "".join(line + self._newline for line in pair_lines(keys, new, 0))
        node, depth = self._root, 0
        pairs: list[tuple[Node, Node]] = []
        while depth < len(keys) and (found := _child(node, keys[depth])) is not None:
            pairs.append((found[0], found[1]))
            node, depth = found[1], depth + 1
        if depth == len(keys) or _is_null(node):
            rest = keys[depth:]
            return self._replaced(*pairs[-1], rest, new)
        return self._added(node, keys[depth], keys[depth + 1 :], new)

    def remove(self, keys: Path) -> str:
        """The text without what is there."""
        assert self._root is not None
        node = self._root
        pairs: list[tuple[Node, Node]] = []
        for key in keys[:-1]:
            found = _child(node, key)
            assert found is not None
            pairs.append(found)
            node = found[1]
        children = _children(node)
        number = next(at for at, (key, _) in enumerate(children) if key == keys[-1])
        if _flows(node):
            return self._removed_of_flow(children, number)
        if len(children) > 1:
            return self._removed_of_block(node, children, number)
        empty = "{}" if isinstance(node, MappingNode) else "[]"
        if not pairs:
            start, end = self._line(node.start_mark.index), self._eol(self._end(node, -1))
            return self._spliced(start, end, empty)
        outer, value = pairs[-1]
        if outer is value:
            return self._replaced(outer, value, (), {} if empty == "{}" else [])
        # Comments above what goes are the block's, and stay.
        first = children[0][1]
        begin = self._dash(node, first) if isinstance(node, SequenceNode) else self._start(first)
        colon, line = self._colon(outer), self._line(begin)
        after = self._text.find("\n", self._eol(max(self._end(node, outer.start_mark.column), line)))
        rest = "" if after < 0 else self._text[after + 1 :]
        return self._mark + self._text[:colon] + f" {empty}" + self._text[colon:line] + rest

    # Pieces of text.

    def _spliced(self, start: int, end: int, new: str) -> str:
        return self._mark + self._text[:start] + new + self._text[end:]

    def _ended(self) -> str:
        return self._text if not self._text or self._text.endswith("\n") else self._text + self._newline

    def _line(self, index: int) -> int:
        """Where the line begins."""
        return self._text.rfind("\n", 0, index) + 1

    def _eol(self, index: int) -> int:
        """Where the line ends, before what breaks it."""
        found = self._text.find("\n", index)
        if found < 0:
            return len(self._text)
        return found - 1 if found > index and self._text[found - 1] == "\r" else found

    def _colon(self, key: Node) -> int:
        """Behind the colon of a key."""
        return self._text.index(":", key.end_mark.index) + 1

    def _end(self, node: Node, indent: int) -> int:
        """Where the last piece of a value ends; ``indent`` is the column of what it belongs to."""
        if isinstance(node, ScalarNode):
            if _is_empty(node):
                return -1
            return self._end_of_lines(node, indent) if node.style in ("|", ">") else int(node.end_mark.index)
        if _flows(node) or not node.value:
            return int(node.end_mark.index)
        if isinstance(node, MappingNode):
            key, value = node.value[-1]
            return max(self._colon(key), self._end(value, key.start_mark.column))
        last = node.value[-1]
        return max(self._end(last, node.start_mark.column), self._dash(node, last) + 1)

    def _dash(self, node: Node, item: Node) -> int:
        """Where the dash of an item of a block stands: below it there may be comments."""
        column, index = node.start_mark.column, item.start_mark.index
        line = self._line(index)
        while line:
            found = line + column
            if found < index and self._text[found] == "-" and not self._text[line:found].strip(" -"):
                return int(found)
            line = self._line(line - 1)
        return int(column)

    def _end_of_lines(self, node: Node, indent: int) -> int:
        """Where a literal or folded scalar ends: its last line that is indented further."""
        end = self._eol(node.start_mark.index)
        line = self._text.find("\n", end) + 1
        while 0 < line < len(self._text):
            stop = self._eol(line)
            content = self._text[line:stop]
            if content.strip():
                if len(content) - len(content.lstrip(" ")) <= indent:
                    break
                end = stop
            line = self._text.find("\n", stop) + 1
        return end

    # Changes.

    def _replaced(self, key: Node, value: Node, rest: Path, new: Any) -> str:
        """Something else as a key's value, or as an item; with ``rest``, a value below further keys."""
        column = key.start_mark.column
        inside = self._in_flow(key)
        if inside or key is value:
            lines = [flow(nested(rest, new))]
        elif rest:
            lines = ["", *pair_lines(rest, new, column + STEP)]
        else:
            lines = value_lines(new, column + STEP, self._colon(key) - self._line(key.start_mark.index))
        if key is value and _is_empty(value):
            dash = self._dash_of(value) + 1
            return self._spliced(dash, dash, f" {lines[0]}")
        if key is value:
            return self._spliced(value.start_mark.index, self._end(value, column - 1), lines[0])
        colon = self._colon(key)
        end = max(colon, self._end(value, column))
        head = self._eol(colon)
        if not _is_empty(value) and len(lines) == 1 and value.start_mark.index < head:
            return self._spliced(value.start_mark.index, end, lines[0])
        if inside:
            return self._spliced(colon, end, f" {lines[0]}")
        # What is beside the key, or behind a value on its line, is a comment and stays there.
        there = not _is_empty(value) and value.start_mark.index < head
        beside = self._text[end : self._eol(end)] if there else self._text[colon:head]
        first = f" {lines[0]}" if lines[0] else ""
        below = "".join(self._newline + line for line in lines[1:])
        return self._spliced(colon, self._eol(end), first + beside + below)

    def _in_flow(self, node: Node) -> bool:
        """Whether a node stands in brackets."""

        def inside(outer: Node) -> bool:
            if isinstance(outer, ScalarNode):
                return False
            if _flows(outer) and outer.start_mark.index < node.start_mark.index < outer.end_mark.index:
                return True
            return any(inside(value) for _, value in _children(outer))

        assert self._root is not None
        return inside(self._root)

    def _added(self, node: Node, key: str | int, rest: Path, new: Any) -> str:
        mapping = isinstance(node, MappingNode)
        value = nested(rest, new) if mapping else named_item(key, nested(rest, new))
        if _flows(node) or not node.value:
            shown = f"{scalar(str(key))}: {flow(value)}" if mapping else flow(value)
            if not node.value:
                start = node.start_mark.index + 1
                return self._spliced(start, start, shown)
            last = node.value[-1][1] if mapping else node.value[-1]
            end = max(last.end_mark.index, self._colon(node.value[-1][0]) if mapping else 0)
            return self._spliced(end, end, f", {shown}")
        column = node.start_mark.column
        lines = pair_lines((str(key), *rest), new, column) if mapping else item_lines(value, column)
        end = self._eol(self._end(node, column))
        return self._spliced(end, end, "".join(self._newline + line for line in lines))

    def _removed_of_flow(self, children: list[tuple[str | int, Node]], number: int) -> str:
        starts = [self._start(value) for _, value in children]
        ends = [max(value.end_mark.index, starts[at]) for at, (_, value) in enumerate(children)]
        if number + 1 < len(children):
            return self._spliced(starts[number], starts[number + 1], "")
        if number:
            return self._spliced(ends[number - 1], ends[number], "")
        return self._spliced(starts[0], ends[0], "")

    def _start(self, value: Node) -> int:
        """Where an item begins: with its key, if it has one."""
        key = self._keys_of.get(id(value))
        return int((value if key is None else key).start_mark.index)

    def _dash_of(self, item: Node) -> int:
        """The dash of an item, whatever list it is of."""

        def search(node: Node) -> int:
            for _, value in _children(node):
                if value is item and isinstance(node, SequenceNode):
                    return self._dash(node, item)
                if (found := search(value)) >= 0:
                    return found
            return -1

        assert self._root is not None
        return search(self._root)

    @property
    def _keys_of(self) -> dict[int, Node]:
        made: dict[int, Node] = {}

        def walk(node: Node) -> None:
            if isinstance(node, MappingNode):
                made.update({id(value): key for key, value in node.value})
            for _, value in _children(node):
                walk(value)

        assert self._root is not None
        walk(self._root)
        return made

    def _removed_of_block(self, node: Node, children: list[tuple[str | int, Node]], number: int) -> str:
        value = children[number][1]
        column = node.start_mark.column
        begin = self._start(value)
        if isinstance(node, SequenceNode):
            begin = self._dash(node, value)
            end = self._eol(max(self._end(value, column), begin + 1))
        else:
            key = node.value[number][0]
            end = self._eol(max(self._colon(key), self._end(value, column)))
        line = self._line(begin)
        if self._text[line:begin].strip():
            # It stands behind a dash: the dash stays, for what comes next.
            following = self._start(children[number + 1][1])
            between = self._text[end:following]
            return self._spliced(begin, end if between.strip() else following, "")
        after = self._text.find("\n", end)
        return self._spliced(line, len(self._text) if after < 0 else after + 1, "")


def _is_empty(node: Node) -> bool:
    """Whether a value is left out: where the parser says that it stands means nothing then."""
    return isinstance(node, ScalarNode) and node.style is None and not node.value


def _is_null(node: Node) -> bool:
    return isinstance(node, ScalarNode) and node.style is None and node.value in ("", "~", "null", "Null", "NULL")


def _children(node: Node) -> list[tuple[str | int, Node]]:
    if isinstance(node, MappingNode):
        return [(key.value, value) for key, value in node.value]
    if isinstance(node, SequenceNode):
        return list(enumerate(node.value))
    return []


def _child(node: Node, step: str | int) -> tuple[Node, Node] | None:
    """Key and value of a mapping, or twice the item of a list."""
    if isinstance(node, MappingNode):
        return next(((key, value) for key, value in node.value if key.value == step), None)
    if isinstance(node, SequenceNode) and isinstance(step, int) and step < len(node.value):
        return node.value[step], node.value[step]
    return None


def _flows(node: Node) -> bool:
    """Whether it is in brackets."""
    return isinstance(node, MappingNode | SequenceNode) and bool(node.flow_style)


def named_item(name: str | int, item: Any) -> Any:
    """A new item of a list; one with a name has it as its first key."""
    if isinstance(name, str) and isinstance(item, dict | None):
        return {"name": name, **(item or {})}
    return item
