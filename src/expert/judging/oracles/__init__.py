"""One judge for each kind of answer: JSON, SQL, Cypher, TypeScript, calls, text."""
