"""48 chat prompts of mixed lengths, for the demonstration: questions, and texts to work on."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ChatPrompt:
    """A user's message, and how many tokens its measured answer has."""

    text: str
    max_tokens: int


_QUESTIONS = (
    "Why is the sky blue?",
    "What is the difference between weather and climate?",
    "Name three fruits that are red.",
    "How does a bicycle stay upright?",
    "Write a haiku about the sea.",
    "What does a librarian do?",
    "Explain what a prime number is.",
    "Give me a simple recipe for pancakes.",
    "What causes the tides?",
    "How do I sharpen a kitchen knife?",
    "Why do leaves change colour in autumn?",
    "What is photosynthesis?",
    "Tell me a short story about a lighthouse keeper.",
    "How do vaccines work?",
    "What should I pack for a day of hiking?",
    "Explain gravity to a child.",
)

_TEXTS = {
    "printing": (
        "Before printing, a book was copied by hand, and a copy took a scribe many months. A "
        "printer set the text in metal letters, inked them, and pressed paper on them; the same "
        "page could then be made again and again. A large sheet was printed on both sides and "
        "folded: once for a folio, twice for a quarto, three times for an octavo of sixteen "
        "pages. The folded sheets were sewn together and bound. Smaller books were cheaper and "
        "could be carried, and so reading left the desk and went into the pocket."
    ),
    "bees": (
        "A honeybee that has found flowers returns to the hive and dances. She walks in a "
        "straight line while she shakes her body, turns back in a half circle, and walks the "
        "line again. The direction of the line tells the others where to fly in relation to the "
        "sun, and its length tells how far. In the dark hive they cannot see her, but they touch "
        "her and feel the shaking. After a few rounds they leave, and most of them find the "
        "same flowers."
    ),
    "harbour": (
        "The harbour lay in fog when the ferry came in. Ida stood at the rail with one suitcase "
        "and a letter she had not opened. The town was smaller than she remembered: the same "
        "church, the same row of yellow houses, but the cannery was gone, and where it had been "
        "there was a square with benches and young trees. A man with a grey dog raised his hand. "
        "She did not know him, but she raised hers too, because it was that kind of morning."
    ),
    "river": (
        "For a hundred years the river ran straight between walls, and the town was glad, for "
        "the meadows no longer flooded. But the water ran faster, dug itself deeper, and drew "
        "the ground water down with it. Wells went dry, and the old trees died from the top. "
        "Now the walls are being taken away again, on one bank at a time. The river builds "
        "islands of gravel and moves them each spring. Kingfishers have come back, and in a wet "
        "year the meadow is once more under water, as the insurance maps now say it should be."
    ),
    "bread": (
        "Mix the flour, the water and the yeast and leave them covered for half an hour; only "
        "then add the salt. Fold the dough over itself every thirty minutes, four times. It is "
        "ready when it has grown by half and trembles when the bowl is shaken. Shape it, let it "
        "rest in a basket overnight in the cold, and heat the oven with a heavy pot inside. "
        "Bake it in the closed pot for twenty minutes, then open for twenty more, until the "
        "crust is dark. Let it cool before you cut it, however hard that is."
    ),
    "meeting": (
        "Present: Amara, Jonas, Li, Petra. The move to the new office is put off to March since "
        "the lift will not be ready. Jonas asks whether the team may work from home in the "
        "first week of the move; all agree. The budget for chairs is overspent by four hundred; "
        "Petra will ask for the money. Li reports that the archive has been scanned up to 1987 "
        "and that two boxes are missing. Amara will look in the cellar. The next meeting is on "
        "the second Tuesday, at ten, in the small room."
    ),
    "stars": (
        "A star is a ball of gas that shines because its middle is so hot and dense that "
        "hydrogen turns into helium there. A heavy star burns quickly and lives for a few "
        "million years; a light one is thrifty and lives longer than the universe is old. When "
        "the hydrogen runs out, the star swells. What happens next depends on its mass: a light "
        "star sheds its outer layers and leaves a white dwarf, a heavy one collapses and blows "
        "itself apart, and the elements that it made become dust for new stars and planets."
    ),
    "letter": (
        "Dear neighbours, on Saturday our daughter turns eighteen and we will celebrate in the "
        "garden. There will be music until eleven, and after that only talk. If it should be "
        "too loud, please ring us rather than suffer: the number is on the gate. Better still, "
        "come over; there is more cake than eighteen people can eat. The hedge has been cut so "
        "that the lights will not shine into your bedroom, and the drums stay in the cellar. "
        "With thanks for your patience, the family in number twelve."
    ),
}

_TASKS = (
    "Summarize this text in one sentence:\n\n{}",
    "What is the main idea of the following text? Answer in a few words.\n\n{}",
    "List three facts from this text:\n\n{}",
    "Write a title for this text, and say why it fits:\n\n{}",
)

# Answers are as uneven as real ones: many short, some long. The order mixes them.
_LENGTHS = (24, 96, 40, 64, 32, 128, 48, 80, 12, 56, 28, 112)


def chat_prompts() -> list[ChatPrompt]:
    """16 questions, 16 texts and 16 pairs of texts with a task each, mixed."""
    texts = list(_TEXTS.values())
    asked = [task.format(texts[(i + j) % 8]) for i, task in enumerate(_TASKS) for j in range(4)]
    pairs = [
        "Compare these two texts:\n\n" + texts[i % 8] + "\n\n" + texts[(i + 1 + i // 8) % 8]
        for i in range(16)
    ]
    mixed = [text for group in zip(_QUESTIONS, asked, pairs, strict=True) for text in group]
    return [ChatPrompt(text, _LENGTHS[i * 5 % 12]) for i, text in enumerate(mixed)]
