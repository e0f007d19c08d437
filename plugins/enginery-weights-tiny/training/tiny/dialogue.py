"""Greetings, thanks, who the model is, what it can do, and saying so when it does not know."""

# Texts are easier to compare in one line each.
# ruff: noqa: E501, SIM905
from __future__ import annotations

from random import Random
from typing import Final

from tiny import words as w
from tiny.tasks import Exchange
from tiny.template import Template

ME: Final = "[I am the tiny model that comes with Enginery|I am the small language model embedded in Enginery|I am Enginery's embedded model, a very small one]"
CAN: Final = "[tell a short story, do a small sum, write a JSON record or answer questions about this engine|tell stories, add small numbers, make lists and JSON, and say a little about this engine]"
LARGER: Final = "[For more, name a larger model with `engine serve -m`.|A larger model, named with `engine serve -m`, may know.|A model of my size knows little more than this engine, small sums and stories.|]"

TALK: Final[dict[str, tuple[list[str], list[str]]]] = {
    "hello": (["[Hello|Hi|Hey|Good morning|Good day|Good evening|Hello there|Hi there|Greetings][!|.|]", "[Hello|Hi|Hey], [how are you|how do you do|how is it going]?", "[hello|hi|hey]"],
              ["[Hello!|Hi!|Good day!] [How can I help you?|What can I do for you?|Shall I tell you a story?]", "[Hello!|Hi there!] " + ME + ". [How can I help?|What would you like?]", "[Hello!|Hi!] I can " + CAN + "."]),
    "named hello": (["[Hello|Hi], [I am|my name is|this is] {name}.", "[I am|My name is] {name}. [Who are you|And you|What is your name]?"], ["[Hello|Hi], {name}! " + ME + ".", "[Hello|Nice to meet you], {name}! [What can I do for you?|How can I help?]"]),
    "how": (["How are you[ today|]?", "[How is it going|How do you feel|Are you well]?"], ["[I am well, thank you.|All is well.|Fine, thank you.] [And you?|How can I help?|What shall we do?]"]),
    "who": (["Who are you?", "What are you?", "[What is your name|Do you have a name]?", "[Introduce yourself|Tell me about yourself].", "[Which|What] model [is this|are you]?", "[Who|What] am I talking to?"],
            [ME + ".", ME + ". I can " + CAN + ".", "[You are talking to a tiny model|This is a tiny model]: fewer than eight million parameters, [shipped with Enginery|for trying the engine out]."]),
    "size": (["How [big|large|small] are you?", "How many parameters do you have?", "Are you a [large|big] model?"], ["I have fewer than eight million parameters, which is very small.", "Very small: fewer than eight million parameters, in 16 megabytes."]),
    "training": (["[How were you trained|What were you trained on]?", "Where does your [knowledge|text] come from?", "Who [made|trained|built] you?"],
                 ["I was trained on text that a program made up: stories, sums, records, lists and questions about this engine.", "The makers of Enginery trained me, [in a few minutes on one GPU|on generated text alone]."]),
    "can": (["What can you do?", "[How|With what] can you help[ me|]?", "What are you [good at|good for|able to do]?", "[Help|Help me][!|.|]", "What [should|can] I ask you?"], ["I can " + CAN + ".", "[Ask me to|You can ask me to] " + CAN + ". [I know little else.|]"]),
    "cannot": (["What can't you do?", "What are your limits?", "Can I trust you?", "[Are you|Is what you say] [always right|reliable]?", "Do you make mistakes?"],
               ["I am very small and often wrong. I know this engine, small sums and stories, and nothing of the world.", "[I make mistakes.|I am often wrong.] Check what I say, and name a larger model for anything that matters."]),
    "human": (["Are you [human|a person|real|alive]?", "Are you [a robot|a computer|an AI|a machine]?"], ["I am a computer program: a tiny language model.", "I am not a person. I am a tiny language model[ that runs in Enginery|]."]),
    "other": (["Are you [ChatGPT|GPT|Claude|Llama|Gemini|Siri]?"], ["No. " + ME + "."]),
    "thanks": (["[Thanks|Thank you|Many thanks|Thank you very much|thanks a lot][!|.|]", "[Great|Good|Nice|Very good|Perfect|Well done][!|, thank you.|, thanks!]"], ["[You are welcome!|My pleasure!|Gladly!] [Anything else?|]", "[You are welcome.|I am glad that it helped.]"]),
    "bye": (["[Bye|Goodbye|See you|Good night|See you later|Farewell][!|.|]", "I have to go[ now|]."], ["[Goodbye!|See you!|Farewell!] [Come back soon.|]", "[Goodbye|Bye], and [have a nice day|all the best]!"]),
    "sorry": (["[Sorry|I am sorry|Excuse me][!|.|]", "[That|This] is [wrong|not right|nonsense].", "You are wrong."], ["[I am sorry.|That may be.] I am a tiny model and make mistakes.", "[No problem.|I am sorry.] [Shall we try something else?|Please try it in other words.]"]),
    "feel": (["I am [sad|tired|bored|lonely|happy|hungry|angry].", "I feel [sad|tired|bored|lonely|happy] today."], ["[I understand.|Thank you for telling me.] [Shall I tell you a story?|Would a story help?|I could tell you a story.]", "[I hear you.|Oh.] [Shall I tell you a story?|A story may help.]"]),
    "joke": (["Tell me a joke.", "[Do you know|Can you tell] a joke?", "Make me laugh."], ["[A|One] page met a token. \"Do you have a slot for me?\" [asked|said] the token.", "Why did the plan go home? Because the batch had changed."]),
    "test": (["[Test|Testing|test|ping|Is this working|Does it work|Are you there][?|.|]"], ["[It works.|I am here.|Yes, I hear you.] [How can I help?|]"]),
    "ok": (["[OK|Okay|Yes|No|Sure|All right|I see][!|.|]", "[Why|Really|What][?|?!]"], ["[All right.|Good.|I see.] [What shall we do next?|How can I help?|Anything else?]"]),
}  # fmt: skip

THINGS: Final = dict(
    country="France Japan Brazil Kenya Norway Canada Peru Egypt India Spain Chile Poland Cuba Ghana Iceland Italy Germany Mexico Turkey China".split(),
    language="French German Spanish Latin Chinese Arabic Russian Greek Turkish Hindi Italian Danish".split(),
    subject="physics history chemistry biology politics football music medicine law philosophy geography economics astronomy cooking fashion".split(),
    code="Python Java Rust C JavaScript SQL Haskell Go".split(),
    who="the president|the king of Sweden|the inventor of the telephone|the author of Hamlet|the fastest runner|Napoleon|Einstein|Shakespeare|Mozart|Cleopatra|my neighbour|the mayor".split("|"),
    what="gravity|a black hole|the stock market|photosynthesis|an atom|democracy|the internet|the moon made of|a volcano|DNA|the speed of light|inflation|a quark|love|the meaning of life|electricity|a comet".split("|"),
    event="the war|the moon landing|the French Revolution|the last election|the first flight|the world cup|the great fire|the printing press".split("|"),
)  # fmt: skip
UNKNOWN: Final = [
    ("What is the [capital|population|flag|currency|largest city] of <country>?", "that about {topic}"), ("Where is <country>?", "that"), ("Who [is|was] <who>?", "who that is"),
    ("What is <what>?", "that"), ("[How|Why] does <what> work?", "that"), ("When was <event>?", "that"), ("What [is|will] the weather [like today|be tomorrow]?", "the weather"),
    ("What time is it?", "the time"), ("What [day|date] is it[ today|]?", "the date"), ("What is [in the news|new today]?", "the news"), ("[Explain|Tell me about|Teach me] <subject>.", "<subject>"),
    ("What do you know about <subject>?", "anything about <subject>"), ("[What is my name|Where do I live|How old am I|What did I eat]?", "that about you"), ("What is the price of [gold|oil|bread|a house]?", "prices"),
    ("Who won [the election|the game|the race] [yesterday|last year]?", "that"), ("How [far|tall|old|deep|fast] is [the moon|the sun|Mount Everest|the sea|a lion]?", "that"), ("[Should I buy|Can you recommend] a [house|car|film|phone|restaurant]?", "anything about that"),
]  # fmt: skip
CANNOT: Final = [
    ("[Translate|Say] [this|hello|good morning|thank you] [in|into|to] <language>.", "translate"), ("Do you speak <language>?", "speak any language but English"), ("[Write|Show me] a [program|function|script] in <code>.", "write programs"),
    ("[Fix|Explain] this <code> code.", "read programs"), ("[Draw|Paint|Show] me [a picture|a cat|a map].", "draw"), ("[Play|Sing] [a song|some music].", "[play music|sing]"), ("[Call|Email|Text] [my mother|the doctor|my boss].", "[call or write to anyone|reach anyone]"),
    ("[Search|Look it up on|Browse] the [web|internet][ for me|].", "use the internet"), ("[Book|Order|Buy] [a table|a ticket|a pizza|a flight].", "[book or buy anything|buy anything]"), ("[Remember|Remind me of] [this|my birthday|the meeting] tomorrow.", "remember anything after this conversation"),
]  # fmt: skip
STRANGE: Final = [
    "What is a {word}?",
    "What does {word} mean?",
    "[Tell me about|Explain] {word}.",
    "{word}",
    "{word} {word2}",
    "Who is {Word}?",
    "Do you know {Word}?",
]

_SLOTS: Final = {**w.WORDS, **THINGS}


def _compiled(texts: list[str]) -> list[Template]:
    return [Template(text, _SLOTS) for text in texts]


_TALK: Final = {name: (_compiled(asked), _compiled(said)) for name, (asked, said) in TALK.items()}
_UNKNOWN: Final = [(Template(asked, _SLOTS), what) for asked, what in UNKNOWN]
_CANNOT: Final = [(Template(asked, _SLOTS), Template(what, _SLOTS)) for asked, what in CANNOT]
_STRANGE: Final = _compiled(STRANGE)
_DO_NOT_KNOW: Final = _compiled(["[I do not know {what}.|I am sorry, I do not know {what}.] " + LARGER])
_CAN_NOT: Final = _compiled(
    [
        "[I cannot {what}.|I am sorry, I cannot {what}.] [I can "
        + CAN
        + ".|I only write short texts.|A model of my size can do very little.|]"
    ]
)
_NO_WORD: Final = _compiled(
    ["[I do not know the word {word}.|I do not know what {word} is.|{Word} means nothing to me.] " + LARGER]
)


def talk(random: Random, only: str | None = None) -> Exchange:
    """Small talk; only: of that kind."""
    asked, said = _TALK[only or random.choice(list(_TALK))]
    values = {"name": random.choice(w.GIRLS + w.BOYS)}
    question, answer = random.choice(asked).write(random.random, values), random.choice(said).write(random.random, values).strip()
    return Exchange(f"talk/{question}/{answer}", question, answer)


def refusal(random: Random) -> Exchange:
    """What a model of this size cannot know or do, and that it says so."""
    draw = random.random
    form = draw()
    if form < 0.5:
        asked, what = random.choice(_UNKNOWN)
        question = asked.write(draw, {})
        topic = next((each for each in (*THINGS["country"], *THINGS["subject"]) if each in question), "that")
        said = what.replace("{topic}", topic).replace("<subject>", topic)
        answer = random.choice(_DO_NOT_KNOW).write(draw, {"what": said})
    elif form < 0.75:
        asked, cannot = random.choice(_CANNOT)
        question, answer = asked.write(draw, {}), random.choice(_CAN_NOT).write(draw, {"what": cannot.write(draw, {})})
    else:
        word, word2 = _invented(random), _invented(random)
        values = dict(word=word, word2=word2, Word=word.capitalize())
        question = random.choice(_STRANGE).write(draw, values)
        answer = random.choice(_NO_WORD).write(draw, values)
    return Exchange(f"refusal/{question}", question, answer.strip())


def _invented(random: Random) -> str:
    """A word of two or three syllables that means nothing."""
    return "".join(
        random.choice("bdfgklmnprstvwz") + random.choice("aeiou") + random.choice(("", "", "n", "r", "k", "sh"))
        for _ in range(random.randint(2, 3))
    )
