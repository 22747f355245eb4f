"""Makes the rows of expert-neo4j: questions over random graphs, with Cypher queries.

    python experts/expert-neo4j/make_data.py --rows 8000 --seed 7 --out datasets

Labels, properties and relationships are drawn for every row. Each row carries statements that make
a small graph. A reader of its own, small enough to be looked through, answers the question on that
graph: the expected query finds something, and nearly right ones (without the condition, another
aggregate, the opposite order, another comparison) find something else. The query without its values
is the skeleton: one like a test row's occurs in no training row.
"""

from __future__ import annotations

import operator
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from data_making.files import main
from data_making.rows import Made, Wanted

LABELS = (
    "Person Movie Book City Company Team Player School Student Teacher Song Artist Shop Product "
    "Hotel Guest Doctor Patient River Bridge Author Club Car Driver"
).split()
TYPES = "KNOWS LIKES OWNS VISITED RATED WORKS_FOR LIVES_IN PART_OF SELLS TEACHES MET LEADS".split()
TEXTS = "city color country status style language region brand".split()
NUMBERS = "age price year score size weight height speed points rating".split()
WORDS = (
    "anna ben carla david emma paris london berlin rome madrid red green blue black white open "
    "closed new old small large north south east west gold silver iron"
).split()
SIGNS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "above": (">", operator.gt),
    "below": ("<", operator.lt),
    "at least": (">=", operator.ge),
    "at most": ("<=", operator.le),
}
NODES = 6
TRIES = 12
"""Graphs that are tried before another question is drawn."""

Node = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A label with its properties; every node has a name besides."""

    label: str
    text: str
    number: str

    def schema(self) -> str:
        return f"{self.label} {{name: STRING, {self.text}: STRING, {self.number}: INTEGER}}"


@dataclass(frozen=True, kw_only=True)
class Schema:
    """Two labels and the relationship between them."""

    start: Kind
    end: Kind
    type: str

    def text(self) -> str:
        ways = f"(:{self.start.label})-[:{self.type}]->(:{self.end.label})"
        return f"{self.start.schema()}\n{self.end.schema()}\n{ways}"


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The nodes of the two labels, and who is connected with whom."""

    starts: list[Node]
    ends: list[Node]
    ways: list[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Condition:
    """Words, Cypher and a test of one node; `key` and `value` are what it speaks of."""

    words: str
    cypher: str
    key: str
    value: Any
    holds: Callable[[Node], bool]


Reading = Callable[[Graph], list[Any]]


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question, its query, and its readings: the right one and wrong ones."""

    task: str
    text: str
    query: str
    right: Reading
    wrong: tuple[Reading, ...]
    speaks_of: tuple[Condition, ...] = ()


def draw(source: random.Random, wanted: Wanted) -> Made | None:
    """One row; None where no graph tells right from wrong."""
    schema = some_schema(source)
    question = source.choice(QUESTIONS)(source, schema)
    skeleton = "cypher " + re.sub(r"'\w+'|\b\d+\b", "?", question.query)
    for _ in range(TRIES if wanted(skeleton) else 0):
        graph = some_graph(source, schema, question)
        expected = question.right(graph)
        if (
            expected
            and expected != [0]
            and all(wrong(graph) != expected for wrong in question.wrong)
        ):
            return Made(
                task=question.task,
                instruction=question.text,
                input=schema.text(),
                output=question.query,
                skeleton=skeleton,
                check={"setup": setup(schema, graph)},
            )
    return None


def some_schema(source: random.Random) -> Schema:
    start, end = source.sample(LABELS, 2)
    texts, numbers = source.sample(TEXTS, 2), source.sample(NUMBERS, 2)
    return Schema(
        start=Kind(label=start, text=texts[0], number=numbers[0]),
        end=Kind(label=end, text=texts[1], number=numbers[1]),
        type=source.choice(TYPES),
    )


def some_graph(source: random.Random, schema: Schema, question: Question) -> Graph:
    """A graph with many values that the question speaks of; numbers of a label all differ."""
    names = source.sample(WORDS, 2 * NODES)
    kinds = {}
    for at, kind in enumerate((schema.start, schema.end)):
        said = [c.value for c in question.speaks_of if c.key == kind.text]
        words = [*said, *source.sample(WORDS, 3)]
        spoken = [c.value for c in question.speaks_of if c.key == kind.number]
        near = {number + step for number in spoken for step in (-1, 0, 1)}
        others = source.sample(sorted(set(range(1, 100)) - near), NODES)
        numbers = source.sample(sorted(near) + others, NODES)
        own = names[at * NODES : (at + 1) * NODES]
        kinds[kind.label] = [
            {"name": name, kind.text: source.choice(words), kind.number: number}
            for name, number in zip(own, numbers, strict=True)
        ]
    pairs = [(a, b) for a in range(NODES) for b in range(NODES)]
    ways = sorted(source.sample(pairs, NODES + 2))
    return Graph(starts=kinds[schema.start.label], ends=kinds[schema.end.label], ways=ways)


def setup(schema: Schema, graph: Graph) -> list[str]:
    """Statements for a database that wants its tables declared."""
    statements = []
    for kind, nodes in ((schema.start, graph.starts), (schema.end, graph.ends)):
        columns = f"name STRING, {kind.text} STRING, {kind.number} INT64, PRIMARY KEY (name)"
        statements.append(f"CREATE NODE TABLE {kind.label} ({columns})")
        made = (f"(:{kind.label} {{{properties(node)}}})" for node in nodes)
        statements.append(f"CREATE {', '.join(made)}")
    table = f"FROM {schema.start.label} TO {schema.end.label}"
    statements.append(f"CREATE REL TABLE {schema.type} ({table})")
    for a, b in graph.ways:
        first = f"(a:{schema.start.label} {{name: '{graph.starts[a]['name']}'}})"
        second = f"(b:{schema.end.label} {{name: '{graph.ends[b]['name']}'}})"
        statements.append(f"MATCH {first}, {second} CREATE (a)-[:{schema.type}]->(b)")
    return statements


def properties(node: Node) -> str:
    parts = (f"{k}: '{v}'" if isinstance(v, str) else f"{k}: {v}" for k, v in node.items())
    return ", ".join(parts)


# --- conditions -----------------------------------------------------------------------------------


def some_condition(source: random.Random, kind: Kind, variable: str) -> tuple[Condition, Condition]:
    """A condition on a node, and one that is not quite it."""
    if source.random() < 0.5:
        word = source.choice(WORDS)
        right = Condition(
            words=f"{kind.text} {word}",
            cypher=f"{variable}.{kind.text} = '{word}'",
            key=kind.text,
            value=word,
            holds=lambda node: node[kind.text] == word,
        )
        return right, replace(right, holds=lambda node: node[kind.text] != word)
    number, said = source.randint(2, 98), source.choice(list(SIGNS))
    (sign, holds), other = SIGNS[said], source.choice([s for s in SIGNS if s != said])
    right = Condition(
        words=f"{kind.number} {said} {number}",
        cypher=f"{variable}.{kind.number} {sign} {number}",
        key=kind.number,
        value=number,
        holds=lambda node: holds(node[kind.number], number),
    )
    return right, replace(right, holds=lambda node: SIGNS[other][1](node[kind.number], number))


# --- questions ------------------------------------------------------------------------------------


def nodes(source: random.Random, schema: Schema) -> Question:
    """A property of the nodes that fulfil a condition."""
    kind = schema.start
    right, wrong = some_condition(source, kind, "n")
    shown = source.choice([p for p in ("name", kind.text, kind.number) if p != right.key])

    def reading(holds: Callable[[Node], bool]) -> Reading:
        return lambda graph: ordered(n[shown] for n in graph.starts if holds(n))

    return Question(
        task="nodes",
        text=f"Show the {shown} of each {kind.label} with {right.words}.",
        query=f"MATCH (n:{kind.label}) WHERE {right.cypher} RETURN n.{shown}",
        right=reading(right.holds),
        wrong=(reading(wrong.holds), reading(lambda node: True)),
        speaks_of=(right,),
    )


def count(source: random.Random, schema: Schema) -> Question:
    kind = schema.end
    right, wrong = some_condition(source, kind, "n")

    def reading(holds: Callable[[Node], bool]) -> Reading:
        return lambda graph: [sum(holds(n) for n in graph.ends)]

    return Question(
        task="count",
        text=f"How many nodes {kind.label} have {right.words}?",
        query=f"MATCH (n:{kind.label}) WHERE {right.cypher} RETURN count(n)",
        right=reading(right.holds),
        wrong=(reading(wrong.holds), reading(lambda node: True)),
        speaks_of=(right,),
    )


def neighbours(source: random.Random, schema: Schema) -> Question:
    """From one label over the relationship to the other, in its direction or against it."""
    forward = source.random() < 0.5
    kind, other = (schema.start, schema.end) if forward else (schema.end, schema.start)
    right, wrong = some_condition(source, other, "b")
    shown = source.choice(("name", kind.text))
    way = f"-[:{schema.type}]->" if forward else f"<-[:{schema.type}]-"

    def reading(holds: Callable[[Node], bool]) -> Reading:
        return lambda graph: ordered(
            a[shown] for a, b in connected(graph, forward=forward) if holds(b)
        )

    word = "to" if forward else "from"
    return Question(
        task="neighbours",
        text=f"Show the {shown} of each {kind.label} with {schema.type} {word} a {other.label} "
        f"with {right.words}.",
        query=f"MATCH (a:{kind.label}){way}(b:{other.label}) WHERE {right.cypher} RETURN a.{shown}",
        right=reading(right.holds),
        wrong=(reading(wrong.holds), reading(lambda node: True)),
        speaks_of=(right,),
    )


def how_many_each(source: random.Random, schema: Schema) -> Question:
    """The number of neighbours of each node that has some."""

    def right(graph: Graph) -> list[Any]:
        found: dict[str, int] = {}
        for a, _ in connected(graph, forward=True):
            found[a["name"]] = found.get(a["name"], 0) + 1
        return ordered(found.items())

    start, end = schema.start.label, schema.end.label
    return Question(
        task="count-each",
        text=f"For each {start}, show the name and the number of {end} by {schema.type}.",
        query=f"MATCH (a:{start})-[:{schema.type}]->(b:{end}) RETURN a.name, count(b)",
        right=right,
        wrong=(lambda graph: ordered((a["name"], 1) for a in graph.starts),),
    )


def first(source: random.Random, schema: Schema) -> Question:
    """A property of the nodes at one end of an order."""
    kind = schema.start
    said, limit = source.choice(("highest", "lowest")), source.randint(2, 4)
    shown = source.choice(("name", kind.text))
    way = " DESC" if said == "highest" else ""

    def reading(*, turned: bool) -> Reading:
        return lambda graph: [
            n[shown] for n in sorted(graph.starts, key=lambda n: n[kind.number], reverse=turned)
        ][:limit]

    return Question(
        task="order",
        text=f"Show the {shown} of the {limit} {kind.label} with the {said} {kind.number}.",
        query=f"MATCH (n:{kind.label}) RETURN n.{shown} "
        f"ORDER BY n.{kind.number}{way} LIMIT {limit}",
        right=reading(turned=said == "highest"),
        wrong=(reading(turned=said != "highest"),),
    )


AGGREGATES: dict[str, tuple[str, Callable[[list[int]], float]]] = {
    "highest": ("max", max),
    "lowest": ("min", min),
    "average": ("avg", lambda found: sum(found) / len(found)),
    "total": ("sum", sum),
}


def aggregate(source: random.Random, schema: Schema) -> Question:
    """One number of all nodes of a label."""
    kind, said = schema.end, source.choice(list(AGGREGATES))

    def reading(word: str) -> Reading:
        return lambda graph: [AGGREGATES[word][1]([n[kind.number] for n in graph.ends])]

    return Question(
        task="aggregate",
        text=f"What is the {said} {kind.number} of {kind.label}?",
        query=f"MATCH (n:{kind.label}) RETURN {AGGREGATES[said][0]}(n.{kind.number})",
        right=reading(said),
        wrong=tuple(reading(word) for word in AGGREGATES if word != said),
    )


def connected(graph: Graph, *, forward: bool) -> Iterator[tuple[Node, Node]]:
    for a, b in graph.ways:
        pair = graph.starts[a], graph.ends[b]
        yield pair if forward else pair[::-1]


def ordered(found: Any) -> list[Any]:
    return sorted(found, key=repr)


QUESTIONS: tuple[Callable[[random.Random, Schema], Question], ...] = (
    nodes,
    count,
    neighbours,
    how_many_each,
    first,
    aggregate,
)

if __name__ == "__main__":
    main(draw, "cypher", Path(__file__).parent)
