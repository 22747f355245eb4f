"""The rows of expert-neo4j: the generator's own reading of a question is the database's."""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from data_making.loading import generator_of

MAKE = generator_of(Path(__file__).parents[1])


def questions(count: int):
    """Questions with their schema and a graph on which they are answered."""
    source = random.Random(5)
    for number in range(count):
        schema = MAKE.some_schema(source)
        question = MAKE.QUESTIONS[number % len(MAKE.QUESTIONS)](source, schema)
        yield schema, question, MAKE.some_graph(source, schema, question)


def test_the_generator_and_the_database_read_every_question_alike():
    pytest.importorskip("ladybug", reason="pip install -e '.[validate]'")
    from expert.judging.oracles.cypher import Graph
    from expert.judging.oracles.cypher_statements import parse

    for schema, question, graph in questions(18):
        with closing(Graph(MAKE.setup(schema, graph), seconds=10.0)) as database:
            rows = database.result_of(parse(question.query))
        found = [tuple(row) if len(row) > 1 else row[0] for row in rows]
        expected = question.right(graph)
        if question.task != "order":
            found, expected = MAKE.ordered(found), MAKE.ordered(expected)
        assert found == expected, question.query


def test_a_question_whose_wrong_readings_give_the_same_is_not_asked(monkeypatch):
    def untold(source, schema):
        asked = MAKE.nodes(source, schema)
        return replace(asked, wrong=(asked.right,))

    def drawn() -> list[bool]:
        return [MAKE.draw(random.Random(n), lambda skeleton: True) is None for n in range(10)]

    monkeypatch.setattr(MAKE, "QUESTIONS", (MAKE.nodes,))
    assert not all(drawn())
    monkeypatch.setattr(MAKE, "QUESTIONS", (untold,))
    assert all(drawn())


def test_names_of_nodes_and_numbers_of_a_label_are_all_different():
    for schema, _, graph in questions(30):
        names = [node["name"] for node in graph.starts + graph.ends]
        assert len(set(names)) == 2 * MAKE.NODES
        for kind, nodes in ((schema.start, graph.starts), (schema.end, graph.ends)):
            assert len({node[kind.number] for node in nodes}) == MAKE.NODES
