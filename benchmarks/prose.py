"""A text to measure a model's accuracy on: narrative, explanation, dialogue, a recipe, code.

Written for this purpose, so that no model has seen it; about 2,500 tokens of SmolLM2.
"""

TEXT = """\
The ferry left the island at six in the morning, before the fog had lifted from the harbour. Only
four passengers stood on the deck: a schoolteacher with a suitcase that would not close, two
brothers who were going to look for work in the city, and an old woman who carried a clock wrapped
in a towel. The captain knew the teacher and both of the brothers, but he had never seen the woman
before, and on an island with three hundred people that was strange enough to make him walk down
from the bridge.

"Is it broken?" he asked, and pointed at the clock.

"No," she said. "It works very well. That is the trouble with it."

He waited for her to go on. She looked at the water for a while and then unwrapped one corner of the
towel. The hands showed twenty minutes past eleven, and the second hand moved, slowly and evenly, in
the wrong direction.

"My husband repaired it the week before he died," she said. "Since then it has been counting back. I
did the sum last night. It will reach the hour of our wedding on Thursday, and I would like to be in
the right town when it does."

The captain did not know what to answer, so he brought her a cup of coffee and a chair. When the fog
opened he showed her the lighthouse, the sandbank where seals lay in winter, and the place where the
old pier had been. She thanked him for each of these things as if he had made them himself. At noon
the ferry came into the city, and the brothers carried her bag up the steps, although it was light.

How a bridge carries its load

A bridge has to do two things at once. It must carry what crosses it, and it must carry itself. In a
short bridge the first of these matters more; in a long one, most of the strength is spent on the
weight of the bridge. This is why a plank across a stream can be a simple beam, but a road across a
wide river hangs from cables or rests on arches.

When a beam bends under a load, the upper part becomes a little shorter and the lower part a little
longer. The material near the top is pressed together, the material near the bottom is pulled apart,
and somewhere between them there is a layer that keeps its length. The farther a fibre lies from
that layer, the more work it does. Engineers use this when they give a steel beam the shape of the
letter I: most of the metal is put into the two flanges, where it is useful, and only a thin web is
left between them. A beam that is twice as high, with the same amount of steel, bends much less.

An arch avoids bending almost completely. Each stone pushes on its neighbours, and the push travels
down the curve into the ground. Stone is very strong when it is pressed and weak when it is pulled,
so the arch suits it; some arches that the Romans built without mortar still carry traffic. The
price is that the ends of an arch push outward. If the banks of the river are soft, something must
hold them together, and that something is often heavier than the arch.

A suspension bridge turns the arch upside down. The cable hangs in a curve, and every part of it is
pulled. Steel wire is excellent at this. The towers take the weight, and at both ends the cables are
anchored in large blocks of concrete. Because the deck is light and flexible, wind is a greater
danger than traffic: if the gusts come at the same rhythm in which the deck likes to swing, the
movement can grow until something breaks. For this reason models of long bridges are tested in wind
tunnels before the first stone is laid.

Bread with rye and seeds

For one loaf you need 350 grams of wheat flour, 150 grams of rye flour, 10 grams of salt, 7 grams of
dry yeast, 380 millilitres of lukewarm water, two tablespoons of sunflower seeds and one tablespoon
of linseed. Mix the two flours with the salt and the yeast in a large bowl. Add the water and stir
with a wooden spoon until no dry flour is left. The dough will be sticky; that is correct, because
rye takes up water slowly. Cover the bowl and wait for ten minutes. Then add the seeds and knead the
dough for eight minutes by hand, or for five minutes in a machine at low speed.

Let the dough rise in a warm place until it has doubled, which takes between sixty and ninety
minutes. Shape it into an oval, put it into a tin that you have brushed with oil, and let it rise
again for half an hour. Heat the oven to 230 degrees Celsius and put a small dish of water on its
floor. Bake for fifteen minutes, take out the water, lower the temperature to 200 degrees, and bake
for another thirty minutes. The loaf is done when it sounds hollow if you knock on its base. Do not
cut it before it is cold, or the crumb will stick to the knife.

Questions and answers

Question: Why is the sky dark at night if there are stars in every direction?
Answer: If the universe were infinitely large, infinitely old and filled evenly with stars, every
line of sight would end on a star, and the whole sky would be as bright as the sun. It is dark
because the universe has a finite age, so that light from very distant stars has not reached us yet,
and because the expansion of space stretches that light to wavelengths that our eyes cannot see.

Question: What is the difference between a virus and a bacterium?
Answer: A bacterium is a living cell. It takes in food, it grows, and it divides. A virus is not a
cell; it is a set of instructions in a shell of protein. It can only multiply inside the cells of
another organism. Antibiotics attack parts that bacteria have and viruses lack, and that is why they
do not help against a cold.

Question: A train leaves at 9:40 and arrives at 13:15. How long does the journey take?
Answer: From 9:40 to 13:00 there are three hours and twenty minutes. Fifteen minutes later it is
13:15, so the journey takes three hours and thirty-five minutes.

Minutes of the meeting of 4 March

Present: Ms Okafor (chair), Mr Lindqvist, Dr Rao, Ms Petrova. Apologies: Mr Haddad.
1. The minutes of the last meeting were accepted without changes.
2. Dr Rao reported on the water pump. The new seal holds, but the motor draws 12% more current than
the data sheet allows. She will ask the supplier for a replacement before the end of the month.
3. Mr Lindqvist presented the budget. Of the 48,000 that were granted, 31,250 have been spent. If
the second pump is ordered in April, the remaining 16,750 will be enough until September.
4. It was agreed to move the open day from 12 June to 19 June, because of the elections.
5. Any other business: the lamp at the back door is still out of order. Ms Petrova will repair it.
The meeting closed at 17:50. The next meeting is on 1 April at 16:00 in the same room.

A small program

The following function in Python finds the longest run of equal items in a list. It goes through the
list once and remembers where the present run began.

def longest_run(items):
    best_start, best_length = 0, 0
    start = 0
    for index, item in enumerate(items):
        if item != items[start]:
            start = index
        length = index - start + 1
        if length > best_length:
            best_start, best_length = start, length
    return items[best_start : best_start + best_length]

assert longest_run([]) == []
assert longest_run([1, 1, 2, 2, 2, 3]) == [2, 2, 2]
assert longest_run(["a"]) == ["a"]

The function needs time in proportion to the length of the list, and no memory apart from a few
numbers. When two runs are equally long it returns the first one, because a later run replaces the
best one only if it is strictly longer. A common mistake is to compare the length only when a run
ends; then the last run of the list is forgotten, unless it is checked once more after the loop.

A letter

Dear Tomas,

thank you for the photographs. I have put the one with the two dogs on the wall above my desk, and
everyone who comes in asks about them. We have had rain for nine days now. The lower field is under
water, and the road to the mill is closed, so the children have not been at school since Monday.
They are delighted; I am less so. Yesterday they built a raft out of four barrels and the old door
of the shed, and they would have reached the sea on it if your aunt had not noticed that it was so
quiet.

You asked whether you should take the position in Lisbon. I can only tell you what I would look at.
The salary is higher, but so is the rent. You would work with people from whom you can learn, and at
your age that is worth more than money. On the other hand you have just begun to feel at home where
you are, and a second move within a year is tiring. Write down what an ordinary Tuesday would look
like in each of the two cities, from breakfast until you go to bed. When I had to choose, long ago,
that list made the decision for me in ten minutes, after I had been turning it over for a month.

Come and see us in spring, when the road is dry. Your room is as you left it, apart from the boxes.

With love,
your grandfather

Why measurements disagree

Two careful people measure the same table and get different results. One writes 120.3 centimetres,
the other 120.5. Neither has made a mistake. The edge of the table is rounded, so that it is not
quite clear where it ends; the wood is a little longer in summer, when the air is damp; and a steel
tape that is pulled tightly becomes longer than one that lies loose. Each of these effects is small,
and each has its own direction. A good report therefore gives two numbers: the result, and how far
from it the true value may reasonably lie.

It is tempting to make the second number small. A reader trusts a result with a narrow range, and it
looks like the work of an expert. But the range is a promise. If the same quantity is measured
again, by someone else and with other tools, the new value should fall inside it about as often as
was said. Whoever promises too much will be found out by the next measurement. Whoever promises too
little gives away what the instrument could have told. Between these two errors there is no rule
that replaces judgement, but there is one habit that helps: to repeat the whole measurement from the
beginning, on another day, without looking at the old notes, and to see by how much the results
differ."""
