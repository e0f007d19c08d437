"""The vocabulary of the generated texts."""

# Texts are easier to compare in one line each.
# ruff: noqa: E501, SIM905
from __future__ import annotations

from typing import Final

GIRLS: Final = (
    "Mia Ada Nora Lina Tilda Rosa Ivy Juno Hanna Elsa Wanda Bea Clara Dora Edith Faye Greta Hilda Ines Jill Kira Lotte Mabel Nell "
    "Olga Petra Ruth Sara Thea Una Vera Willa Yara Zoe Anna Maud"
).split()
BOYS: Final = (
    "Tom Ben Otto Finn Hugo Karl Leo Max Nils Oskar Paul Rolf Sam Theo Udo Victor Will Yann Zeno Abel Bruno Carl David Emil Felix Gus "
    "Henry Ivan Jonas Kurt Lars Milo Noah Omar Peter Ravi"
).split()
ANIMALS: Final = (
    "fox hare mouse hedgehog squirrel cat dog rabbit duck goose frog otter mole badger lamb goat pony donkey sparrow robin turtle bear "
    "wolf deer"
).split()
COLOURS: Final = "red blue green yellow white black brown grey pink purple gold silver".split()
FRUITS: Final = "apples pears plums cherries grapes lemons figs nuts berries peaches".split()
FOODS: Final = "bread soup cheese honey jam cake rice porridge pie noodles beans salad".split()
DAYS: Final = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS: Final = "January February March April May June July August September October November December".split()
SEASONS: Final = "spring summer autumn winter".split()
NUMBERS: Final = "zero one two three four five six seven eight nine ten eleven twelve".split()
JOBS: Final = "baker teacher farmer painter sailor gardener doctor miller tailor pilot singer carpenter".split()
TOWNS: Final = (
    "Oakham Redmill Stonebridge Westport Elmsted Fernhill Larkwood Millbrook Northgate Pinecrest Riverton Saltmarsh".split()
)
HOBBIES: Final = "chess drawing swimming reading singing cooking running fishing knitting dancing gardening sailing".split()
OBJECTS: Final = "cup lamp chair table box book clock coat hat bell rope kite drum boat basket key".split()
MATERIALS: Final = "wood glass clay iron paper wool stone leather cotton brass".split()
SORTABLE: Final = sorted({*ANIMALS, *FRUITS, *FOODS, *OBJECTS, *JOBS, *HOBBIES, *COLOURS})
OPPOSITES: Final = dict(
    pair.split("-")
    for pair in (
        "hot-cold big-small tall-short fast-slow light-dark old-new wet-dry high-low open-closed full-empty happy-sad loud-quiet "
        "early-late hard-soft near-far thick-thin clean-dirty strong-weak rich-poor right-wrong up-down day-night left-right"
    ).split()
)
SOUNDS: Final = {"cat": "meow", "dog": "woof", "duck": "quack", "cow": "moo", "sheep": "baa", "bee": "buzz", "owl": "hoot"}

# Lists that templates name between angle brackets.
WORDS: Final = {
    "colour": COLOURS,
    "fruit": FRUITS,
    "food": FOODS,
    "day": DAYS,
    "season": SEASONS,
    "soft": "softly quietly slowly gently shyly calmly".split(),
    "loud": "loudly happily proudly merrily brightly cheerfully".split(),
    "size": "small tiny big long round narrow wide".split(),
    "time": ["one morning", "one evening", "one day", "early one day", "on a bright day", "late one night", "after lunch"],
    "Time": ["One morning", "One evening", "One day", "Early one day", "On a bright day", "Late one night", "The next day", "At last"],
    "weather": [
        "the sun was warm", "a light rain fell", "the wind blew hard", "thick fog lay over the fields", "snow covered the ground",
        "the sky was clear", "dark clouds hung low", "the air smelled of hay", "frost shone on the grass", "a rainbow stood in the west",
    ],
    "sad": ["sad", "tired", "worried", "lost", "a little afraid", "cross", "close to tears", "unsure"],
    "glad": ["glad", "happy", "proud", "full of joy", "very pleased", "as happy as could be", "warm inside"],
    "walk": ["walked", "ran", "hurried", "strolled", "wandered", "marched", "crept"],
}  # fmt: skip
