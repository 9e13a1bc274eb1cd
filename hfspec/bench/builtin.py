"""The built-in prompts: 24 texts, four for each of six kinds of work. Data only.

Chosen to give long answers, so that the end of the text seldom comes before the token limit. Prose is
wrapped here for reading and unwrapped before use; code is used as it stands.
"""

import re

_LINE_BREAK = re.compile(r"(?<!\n)\n(?!\n)")


def _prose(text: str) -> str:
    """Paragraphs as one line each."""
    return _LINE_BREAK.sub(" ", text.strip())


#: Raw text for the model to continue, without a chat template.
CODE_COMPLETION = (
    '''\
"""Reading and writing the settings of a small command-line tool."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass
class Settings:
    """What the user can set.

    Attributes:
        name: shown in the greeting.
        retries: how often a failed request is tried again.
        timeout: seconds to wait for an answer.
        tags: labels attached to every request.
    """

    name: str = "world"
    retries: int = 3
    timeout: float = 10.0
    tags: list[str] = field(default_factory=list)

    def validate(self) -> None:
        """Raise ValueError if any value cannot work."""
        if not self.name:
            raise ValueError("name must not be empty")
''',
    '''\
from collections import deque


class Graph:
    """A directed graph with weighted edges."""

    def __init__(self):
        self.edges = {}

    def add_node(self, node):
        """Add a node without edges; adding it twice changes nothing."""
        self.edges.setdefault(node, {})

    def add_edge(self, source, target, weight=1.0):
        """Add an edge and both of its ends."""
        self.add_node(source)
        self.add_node(target)
        self.edges[source][target] = weight

    def breadth_first(self, start):
        """Yield the nodes reachable from start, nearest first."""
        seen = {start}
        queue = deque([start])
        while queue:
            node = queue.popleft()
            yield node
            for neighbour in self.edges[node]:
                if neighbour not in seen:
                    seen.add(neighbour)
                    queue.append(neighbour)

    def depth_first(self, start):
        """Yield the nodes reachable from start, going deep before going wide."""
''',
    """\
import unittest

from shop import Basket, EmptyBasketError, Item


class BasketTest(unittest.TestCase):
    def setUp(self):
        self.basket = Basket()
        self.apple = Item("apple", price=40)
        self.bread = Item("bread", price=250)

    def test_new_basket_is_empty(self):
        self.assertEqual(len(self.basket), 0)
        self.assertEqual(self.basket.total(), 0)

    def test_adding_an_item_raises_the_total(self):
        self.basket.add(self.apple)
        self.assertEqual(self.basket.total(), 40)

    def test_adding_an_item_twice_counts_it_twice(self):
        self.basket.add(self.apple)
        self.basket.add(self.apple)
        self.assertEqual(self.basket.total(), 80)

    def test_removing_an_item_lowers_the_total(self):
""",
    """\
// A fixed-size ring buffer for samples from a sensor.

#include <stdbool.h>
#include <stddef.h>

#define CAPACITY 64

typedef struct {
    float samples[CAPACITY];
    size_t head;   // index of the oldest sample
    size_t count;  // number of samples stored
} ring_buffer;

void ring_init(ring_buffer *ring) {
    ring->head = 0;
    ring->count = 0;
}

bool ring_is_full(const ring_buffer *ring) {
    return ring->count == CAPACITY;
}

// Store a sample; returns false and stores nothing if the buffer is full.
bool ring_push(ring_buffer *ring, float sample) {
""",
)

CODE_CHAT = (
    _prose("""
Write a Python function that parses durations such as "1h30m", "45s" or "2d4h" into seconds. It should
reject malformed input with a helpful error. Add a docstring, explain your approach briefly, and show a few
examples with their results.
"""),
    _prose("""
I have a PostgreSQL table orders(id, customer_id, placed_at, total_cents). Write a query that returns, for
each of the last twelve months, the number of orders, the revenue and the change in revenue against the
month before. Explain each part of the query.
"""),
    """\
Why does this Python code print the wrong result, and how should I fix it? Show the corrected code and \
explain the general rule behind it.

```python
def make_multipliers():
    return [lambda x: i * x for i in range(5)]

for multiply in make_multipliers():
    print(multiply(2))
```
""",
    _prose("""
Implement a least-recently-used cache in TypeScript with get, set and delete, a maximum size, and an
optional time to live for each entry. Use generics, keep every operation at constant time, and explain the
data structure you chose.
"""),
)

SUMMARISE = (
    _prose("""
Summarise the following article in one paragraph of about six sentences, then list the four most important
facts as bullet points.

For most of the last century the river below the town of Harwick ran brown. Three paper mills, a tannery and
a slaughterhouse emptied their waste into it, and by 1970 a survey of twelve kilometres of water found not a
single living fish. The last mill closed in 1994, but the river did not recover by itself: the bed was
covered by a layer of fibre up to forty centimetres thick, and the old weirs kept fresh gravel from moving
downstream. In 2009 the county bought the weirs for a symbolic sum and began to take them out, one each
summer, starting at the mouth. Engineers had expected the fibre to be washed away within two winters. It
took seven, partly because a drought in 2013 left too little water to move it. Brown trout were first seen
again in 2016, and otters followed two years later. The work cost 4.1 million, about a third less than a
treatment plant that had been considered instead, and anglers now pay more in permits each year than the
town once spent on monitoring the pollution.
"""),
    _prose("""
Write a summary of these meeting notes for colleagues who were not there. Mention every decision and who is
responsible for it.

Present: Amara, Jonas, Li and Petra. Jonas reported that the new booking page went live on Monday and that
the share of visitors who finish a booking rose from 31 to 38 percent, although the page is slower on older
phones. Li has traced this to the calendar, which loads a whole year of prices at once; she proposes to load
two months and fetch the rest when someone scrolls. Everyone agreed, and Li will finish it by the 14th. Petra
said that the support team receives about twenty questions a day about refunds, most of them because the
confirmation mail does not say when the money arrives. Amara will rewrite the mail and show it to Petra
before Friday. There was a longer discussion about whether to drop payment by invoice. Jonas was in favour,
since only four percent of customers use it, but Petra pointed out that these are nearly all schools, which
book large groups. It was decided to keep invoices for orders above 500 and to look at the numbers again in
March. The next meeting is on Thursday at ten, and Jonas will take the notes.
"""),
    _prose("""
Summarise this text for a twelve-year-old reader in about 120 words. Keep all the main steps in the right
order.

When a honeybee colony grows too large for its hive, it prepares to divide. The workers first build special
cells that hang from the edge of the comb and feed the larvae in them with a rich secretion, so that they
develop into queens. About a week before the first of these hatches, the old queen stops laying eggs and
becomes lighter, which allows her to fly. On a warm day around noon she leaves with more than half of the
workers. They settle as a dense cluster on a branch nearby, and several hundred experienced scouts search
the neighbourhood for a dry cavity of roughly forty litres with a small entrance facing south. A scout that
finds one returns and dances on the surface of the cluster; the better the place, the longer she dances.
Others inspect what was advertised and dance in turn, so that support for the best site grows while interest
in the others fades. Once enough scouts meet at a single cavity, they return, warm up the cluster, and lead
the swarm to its new home. In the old hive, the first young queen to emerge usually destroys her rivals.
"""),
    _prose("""
Below is a customer review. Summarise it under the headings "What is good", "What is bad" and "Who should
buy it", with two or three full sentences under each.

I have used this bicycle trailer nearly every day for nine months, mostly to take two children to nursery and
to carry shopping back. It folds flat in under a minute, and the coupling fits both of our bikes without
tools. Even with 35 kilograms in it the trailer follows without swaying, and the suspension takes kerbs
well. The rain cover is a disappointment. It kept everything dry for the first few weeks, but the seam above
the window began to leak in autumn, and the replacement I was sent for free did the same by January. I ended
up sealing it myself. The wheels have stayed true, though one tyre wore out sooner than I expected. What I
would most like to see improved is the manual: half of the pictures show an older model, and nothing in it
explains how to fit the second seat belt. When I phoned, however, someone picked up immediately and talked me
through it. At this price I had hoped for lights as well, which you have to buy separately. All in all I
would choose it again, because it has replaced our second car.
"""),
)

REWRITE = (
    _prose("""
Rewrite the following e-mail so that it is polite, clear and free of mistakes. Keep all the facts and return
the whole e-mail.

Subject: the broken delivery again!!

Hi, this is now the third time i write to you and nobody have answered me so far. I ordered two oak shelfs on
the 3rd of may (order 88213), they should of come within ten days, but it took almost four weeks until
finally something arrived. One of the shelf had a big crack along the left side, and in the other box was
only half of the screws. I send you pictures of it the same evening. A women on the phone told me that
someone will call me back in the next two days, but nobody did. Meanwhile I have a living room full of books
that are laying on the floor, and my mother is coming for visit at the end of june. What I want is really
simple: send me one new shelf and a full bag of screws until the 20th, or else take everything back and pay
me the full 349 euro including the 29 euro for shipping. If i dont hear from you until friday I will ask my
bank to get back the money. greetings, Dana Koller
"""),
    """\
Add type hints and docstrings to this module, and replace the repeated code by a helper function. Return the \
complete module.

```python
import csv

def total_by_region(path):
    totals = {}
    with open(path, newline="") as handle:
        for row in csv.DictReader(handle):
            region = row["region"].strip().lower()
            amount = float(row["amount"].replace(",", ""))
            if region not in totals:
                totals[region] = 0
            totals[region] += amount
    return totals

def total_by_product(path):
    totals = {}
    with open(path, newline="") as handle:
        for row in csv.DictReader(handle):
            product = row["product"].strip().lower()
            amount = float(row["amount"].replace(",", ""))
            if product not in totals:
                totals[product] = 0
            totals[product] += amount
    return totals

def print_report(path):
    for region, amount in sorted(total_by_region(path).items()):
        print(f"{region:20} {amount:12.2f}")
    print("-" * 33)
    for product, amount in sorted(total_by_product(path).items()):
        print(f"{product:20} {amount:12.2f}")
```
""",
    _prose("""
Rewrite this recipe for eight people instead of four, with metric units only, and change nothing else.
Return the complete recipe.

Lentil soup with roasted carrots (serves four). Heat the oven to 200 degrees. Peel 6 carrots, cut them into
pieces the length of a finger, and toss them in a bowl with 2 tablespoons of olive oil, half a teaspoon of
salt and 1 teaspoon of cumin seeds. Spread them on a baking tray and roast them for 30 minutes, turning them
once. Meanwhile chop 1 large onion and 2 cloves of garlic, and soften them in a pot with 1 tablespoon of
olive oil for about 8 minutes. Add 9 ounces of red lentils, 1 can of tomatoes (14 ounces) and 5 cups of
vegetable stock. Bring everything to the boil, cover it, and let it simmer for 20 minutes until the lentils
fall apart. Stir in the juice of half a lemon and a pinch of chilli flakes. Blend half of the soup until it
is smooth, return it to the pot, and taste it for salt. Serve it in warm bowls with the carrots on top, a
spoonful of yoghurt each, and 1 ounce of chopped parsley divided between them.
"""),
    """\
Convert this C function to idiomatic Python, keep the comments, and use the same names where you can. Return \
the complete function and one example call.

```c
/* Merge overlapping intervals in place.
 * The intervals must be sorted by their start.
 * Returns the number of intervals that remain. */
int merge_intervals(struct interval *list, int count) {
    if (count == 0) {
        return 0;
    }
    int last = 0;
    for (int i = 1; i < count; i++) {
        if (list[i].start <= list[last].end) {
            /* They overlap: extend the last one if needed. */
            if (list[i].end > list[last].end) {
                list[last].end = list[i].end;
            }
        } else {
            /* A gap: keep this interval as a new one. */
            last = last + 1;
            list[last] = list[i];
        }
    }
    return last + 1;
}
```
""",
)

QUESTION = (
    _prose("""
Read the text and answer each question in one or two full sentences, quoting the words of the text that
support your answer.

The lighthouse on Skerry Point was built between 1848 and 1853 by the engineer Margaret Orr, who had taken
over the work when her father fell ill. Earlier attempts had failed because the rock is covered by the sea
for all but three hours of each tide. Orr had every stone cut and fitted together on the mainland, numbered,
and taken apart again, so that the crew on the rock only needed to set the blocks in place. The tower is 38
metres high and contains 2,140 blocks of granite, each locked to its neighbours by dovetail joints. For its
first sixty years the lamp burned rapeseed oil; it was changed to paraffin in 1913 and to electricity in
1962. Three keepers lived in the tower at a time, for six weeks each, until the light was automated in 1987.
Today it is inspected twice a year by helicopter.

Questions: 1. Why had earlier attempts failed? 2. How did Orr shorten the work on the rock? 3. What held the
blocks together? 4. Which fuels were used, and when did they change? 5. What ended the work of the keepers?
"""),
    _prose("""
Answer the questions below using only the policy text. Give the reason for every answer.

Remote work policy, section 4. Employees who have completed their probation may work from home on up to three
days a week. Days are agreed with the team lead by Thursday of the week before. During the core hours, from
ten to three, everyone can be reached by phone. Work from another country is possible for at most twenty days
in a calendar year and only within countries with which a tax agreement exists; it must be requested at least
four weeks in advance, and the payroll department has to approve it. The company provides a laptop, a headset
and, on request, a screen. A chair or a desk is not provided, but up to 180 a year are refunded against
receipts. Customer files on paper may not leave the office. An employee who loses a device reports it to the
service desk within two hours, also at night and at weekends. Team leads may suspend remote work for a week
at a time if a deadline requires it.

Questions: 1. Mia started last month; may she work from home? 2. Tom wants to work from abroad for five weeks;
is that possible? 3. Who pays for a new desk chair? 4. A laptop is lost on a Saturday evening; what has to
happen? 5. Can a team lead order everyone into the office?
"""),
    """\
Here is the log of a failed deployment. Explain step by step what happened, what the cause most likely was, \
and what should be done to keep it from happening again.

```
09:14:02 deploy  INFO   release 2.8.1 started by ci
09:14:05 deploy  INFO   3 instances in pool: web-1 web-2 web-3
09:14:09 web-1   INFO   draining connections (timeout 30s)
09:14:31 web-1   INFO   stopped
09:14:33 migrate INFO   applying 0042_split_address
09:16:50 web-2   ERROR  column "address" does not exist
09:16:50 web-3   ERROR  column "address" does not exist
09:16:52 balancer WARN  web-2 failed 3 health checks, removed
09:16:53 balancer WARN  web-3 failed 3 health checks, removed
09:16:53 balancer ERROR no healthy instance left
09:17:10 migrate INFO   0042_split_address done in 157s
09:17:12 web-1   INFO   starting release 2.8.1
09:17:40 web-1   INFO   healthy
09:17:41 balancer INFO  web-1 added
```
""",
    _prose("""
Using the passage, explain how the two methods differ, when each is better, and what the author would advise
a small workshop to do.

Timber has to lose most of its water before it can be made into furniture. In air drying the boards are
stacked outdoors under a roof, separated by thin strips so that the wind can pass. The rule of thumb is one
year for each two and a half centimetres of thickness, and in our climate the wood will not go below about
fifteen percent moisture, however long it stays there. It costs little more than space and patience, and the
slow pace leaves few stresses in the wood. In a kiln, warm air is moved through the stack while the humidity
is lowered step by step. Oak that would need two years outside is ready in six weeks at eight percent, which
is what a heated room demands, and the heat also kills insects. But a kiln is expensive to run, and if the
schedule is hurried the surface hardens while the core is still wet, so that the boards split later. I have
therefore come to combine the two: a year outside takes out the bulk of the water for nothing, and ten days in
a rented kiln do the rest.
"""),
)

OPEN_CHAT = (
    _prose("""
Explain how vaccines train the immune system, for someone who left school a long time ago. Use an everyday
comparison and mention why some vaccines need a booster.
"""),
    _prose("""
Write a short story about a lighthouse keeper who discovers that the light has been sending messages by
itself. It should have dialogue and a surprising end.
"""),
    _prose("""
I would like to learn to play the piano as an adult with about thirty minutes a day. Propose a plan for the
first three months and say how I will notice that I am making progress.
"""),
    _prose("""
What are the advantages and disadvantages of a four-day working week for a company of about fifty people?
Argue both sides and end with a recommendation.
"""),
)

BY_CATEGORY = {
    "code completion": CODE_COMPLETION,
    "code chat": CODE_CHAT,
    "summarise": SUMMARISE,
    "rewrite": REWRITE,
    "question": QUESTION,
    "open chat": OPEN_CHAT,
}
RAW_CATEGORIES = frozenset({"code completion"})
