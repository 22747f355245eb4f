"""Texts of the kinds that experts are trained on, long enough for several rows of 2048 tokens."""

from __future__ import annotations

import json

_PROSE = """The ferry left the island at a quarter past six, while the harbour lamps were still lit.
Nobody spoke much. An old man who had crossed every week for thirty years stood at the rail and
named the rocks as they went by, as other people name the stations of a railway. Behind him two
children argued in whispers whether a seal is a kind of dog. When the wind turned, the captain came
out of his cabin, looked at the sky for longer than anyone liked, and went in again without a word.

By eight the mainland had become a thin grey line. The engine changed its voice; the deck shook a
little less. A woman in a green coat unfolded a letter that she must have read many times, because
it had come apart along its folds, and she held the four pieces together as if they were a map. "It
is only two days," she said to nobody. The old man nodded. He had heard that before, and he had also
seen people who said it stay for the rest of their lives."""

_CODE = '''def merge_intervals(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join intervals that overlap or touch; the result is sorted and has no overlaps."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            last_start, last_stop = merged.pop()
            merged.append((last_start, max(last_stop, stop)))
        else:
            merged.append((start, stop))
    return merged


class RateLimiter:
    """Allows so many calls in any window of so many seconds."""

    def __init__(self, calls: int, seconds: float, clock=time.monotonic) -> None:
        self.calls, self.seconds, self.clock = calls, seconds, clock
        self._times: deque[float] = deque()

    def allow(self) -> bool:
        now = self.clock()
        while self._times and now - self._times[0] >= self.seconds:
            self._times.popleft()
        if len(self._times) >= self.calls:
            return False
        self._times.append(now)
        return True
'''

_SCRIPT = """interface Order { id: number; customer: string; total: number; paid: boolean }

export async function unpaidOrders(url: string, least = 0): Promise<Map<string, Order[]>> {
  const response = await fetch(`${url}/orders?paid=false`);
  if (!response.ok) throw new Error(`orders: ${response.status} ${response.statusText}`);
  const orders: Order[] = await response.json();
  const byCustomer = new Map<string, Order[]>();
  for (const order of orders.filter(({ total }) => total >= least)) {
    const known = byCustomer.get(order.customer) ?? [];
    byCustomer.set(order.customer, [...known, order]);
  }
  return byCustomer;
}
"""

_QUERY = """-- How much every region sold in each month, with the month before beside it.
WITH monthly AS (
    SELECT r.name AS region,
           date_trunc('month', o.ordered_at) AS month,
           sum(i.quantity * i.unit_price * (1 - coalesce(i.discount, 0))) AS revenue,
           count(DISTINCT o.customer_id) AS customers
      FROM orders o
      JOIN order_items i ON i.order_id = o.id
      JOIN stores s ON s.id = o.store_id
      JOIN regions r ON r.id = s.region_id
     WHERE o.ordered_at >= DATE '2023-01-01' AND o.ordered_at < DATE '2024-01-01'
       AND o.status NOT IN ('cancelled', 'returned')
     GROUP BY r.name, date_trunc('month', o.ordered_at)
)
SELECT region, month, revenue, customers,
       lag(revenue) OVER (PARTITION BY region ORDER BY month) AS month_before,
       round(100.0 * revenue / nullif(sum(revenue) OVER (PARTITION BY month), 0), 1) AS share
  FROM monthly
 ORDER BY region, month;
"""

_CITIES = ("Porto", "Lyon", "Graz", "Turku", "Bergen", "Split", "Ghent", "Bilbao")
_GOODS = ("rope", "lamp oil", "sail cloth", "dried fish", "salt", "tea", "paper", "brass fittings")


def _records(first: int, count: int) -> str:
    """Shipments as JSON, each different from the others."""
    return json.dumps(
        [
            {
                "id": 4000 + 37 * number,
                "from": _CITIES[number % 8],
                "to": _CITIES[(3 * number + 1) % 8],
                "goods": [
                    {"name": _GOODS[(number + step) % 8], "kilograms": 12.5 * (number % 7 + step)}
                    for step in range(1, 3)
                ],
                "insured": number % 3 == 0,
            }
            for number in range(first, first + count)
        ],
        indent=2,
    )


def _table(name: str) -> str:
    """SQL that makes and fills a table."""
    rows = ",\n".join(
        f"  ({number}, '{_CITIES[number % 8]}', '{_GOODS[(5 * number) % 8]}', {number * 9.75:.2f})"
        for number in range(1, 9)
    )
    return (
        f"CREATE TABLE {name} (id integer PRIMARY KEY, city text, article text, price numeric);\n"
        f"INSERT INTO {name} VALUES\n{rows};\n"
        f"SELECT city, avg(price) FROM {name} GROUP BY city HAVING avg(price) > 20;\n"
    )


def pieces(size: int, starts: range) -> list[dict[str, str]]:
    """Rows of so many characters, cut from every text from these places on."""
    rows = [{"text": text[start : start + size]} for text in TEXTS for start in starts]
    return [row for row in rows if row["text"].strip()]


TEXTS = (
    _PROSE,
    _CODE,
    _records(0, 8),
    _QUERY,
    _SCRIPT,
    _table("stock"),
    _records(20, 3),
    "Question: why is the sky blue?\nAnswer: air scatters short waves more than long ones.",
    _table("returns"),
    "\n".join(_PROSE.splitlines()[:3]) + "\n" + _CODE[:400],
)
