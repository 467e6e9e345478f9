"""What is talked about: three texts, and what somebody who has read them asks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Conversation:
    """One text that the model is given first, and the questions that follow, one per turn."""

    title: str
    text: str
    questions: tuple[str, ...]


CONVERSATIONS = (
    Conversation(
        title="The lighthouse",
        text="""\
The lighthouse at Skarvholm stands on a bare rock eleven miles from the coast. It was built between
1868 and 1871 by forty masons, who cut the granite on the mainland, numbered every stone, and
shipped the tower out in pieces during two short summers. The light is forty-one metres above the
water, and in clear weather it is seen from twenty-two miles away.

For ninety-six years it was looked after by three keepers, who stayed for six weeks and then had
two weeks ashore. The first keeper trimmed the lamp and wound the clockwork that turned the lens,
every four hours, day and night. The second kept the logbook: wind, sea, passing ships, and birds
that had struck the glass. The third cooked, and mended what the salt had eaten since the day
before. Fresh water came from the roof, when it rained, and from barrels when it did not.

The winter of 1909 was the worst that the logbook knows. A storm that began on the fourth of
December went on for nineteen days. No boat could land. On the ninth day the sea broke the kitchen
window, twelve metres up, and put out the stove, and from then on the men ate cold herring and
biscuit. The second keeper, Anna Brekke's father, wrote on the seventeenth day that the tower moved
"like a tall man in thought". The lamp did not go out once. When the supply boat came on the
twenty-third, the keepers asked first for tobacco, then for news, and only then for bread.

The last keepers left in 1967, when an electric lamp and a cable took their place. Today the rooms
belong to a society of volunteers. They paint the iron each May, count the seals in September, and
let visitors sleep in the keepers' bunks for three nights at a time, if the weather agrees to it.
""",
        questions=(
            "In one sentence, what is this text about?",
            "How many keepers looked after the light, and what did each of them do?",
            "What happened on the ninth day of the storm of 1909?",
            "What may a visitor do there today?",
        ),
    ),
    Conversation(
        title="The bakery",
        text="""\
Notes for whoever opens the bakery on a Saturday. Please read them to the end before you light
anything.

The starter lives on the middle shelf of the cold room, in the blue crock. Take it out at half past
two in the morning, give it four hundred grams of rye flour and four hundred grams of water at
thirty degrees, stir until no dry flour is left, and set it by the oven. It has risen enough when
a spoonful floats in a glass of water, which takes two hours in summer and nearly three in winter.
Always put two hundred grams back into the cold room before you use the rest. We have lost the
starter once, in 2014, and borrowed it back from a customer who had been given a jar of it.

The oven needs ninety minutes from cold. Set the deck to two hundred and fifty degrees and leave the
damper open until the first bread goes in. Country loaves bake for forty-five minutes, with steam
for the first ten; rolls take eighteen minutes, and go in only after the loaves, when the deck has
fallen to two hundred and twenty. If the crust is pale after half an hour, the steam valve has
stuck again: knock on it gently with the wooden peel, never with iron.

On a Saturday we sell about one hundred and twenty loaves and six hundred rolls. Mr. Okafor from the
hotel collects forty rolls at a quarter to six, by the side door, and pays at the end of the month.
The school fair is on the first Saturday in June, and takes another two hundred rolls, which must be
ordered in advance: without an order in the red book, the answer is no, however kindly they ask.

Before you leave, sweep the deck, empty the ash tray, and write down the weight of the flour that is
left. The mill delivers on Mondays, and it wants to know by Saturday noon.
""",
        questions=(
            "In one sentence, what are these notes for?",
            "How do I know that the starter has risen enough?",
            "What should I do if the crust is pale after half an hour?",
            "Who collects rolls by the side door, and when?",
        ),
    ),
    Conversation(
        title="The rover",
        text="""\
Summary of the mission for new members of the operations team. The rover Linnet landed in an old
river delta on the third of March, four hundred and eleven Martian days ago. It weighs one hundred
and eighty-five kilograms, has six wheels, and was planned to work for ninety days. It carries a
drill that reaches sixty centimetres, two cameras on a mast, a weather station, and an oven in which
a sample is heated to nine hundred degrees so that its gases can be weighed.

A working day begins with a message from the rover at about seven in the morning, local time. It
tells us how much energy the panels gave the day before, how warm the batteries stayed during the
night, and whether the last drive ended where it was meant to end. The team then has four hours to
plan the next day, to test the plan on the twin that stands in the sand room, and to send it.
Nothing is sent that has not been driven in the sand room first. This rule was made on day
fifty-two, when an untested turn buried the left rear wheel, and it took seventeen days to climb
out again.

Dust is our main worry. On day two hundred and six a storm cut the power to a fifth, and the rover
slept for thirty-three days with only its clock running. It woke by itself on day two hundred and
thirty-nine. Since then the panels give about two thirds of what they gave at the start, and we no
longer drive and drill on the same day.

The most important sample so far is number fourteen, a fine grey clay from the foot of the western
cliff. It released water at two different temperatures, which means that it has been wet at least
twice. The next goal is the cliff itself, three hundred metres to the west. At our present speed of
twenty metres a day, and with one day of rest in every four, we expect to be there in three weeks.
""",
        questions=(
            "In one sentence, what does this summary describe?",
            "Why is nothing sent that has not been driven in the sand room?",
            "What happened to the rover on day two hundred and six?",
            "Why is sample number fourteen important?",
        ),
    ),
)
