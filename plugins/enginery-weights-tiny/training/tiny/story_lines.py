"""The sentences that stories are made of, by section. `stories` says in which order, and what agrees with what."""

# Texts are easier to compare in one line each.
# ruff: noqa: E501
from __future__ import annotations

from typing import Final

# trait: what the story teaches
TRAITS: Final = {
    "brave": ["[Being brave|Courage] [does not mean|is not] [having no fear|being without fear]; it [means going on|is going on] [all the same|anyway].",
              "[A small step|One step] taken with courage [is worth|counts more than] [ten|many|a hundred] [big words|promises]."],
    "patient": ["[Patience|Waiting well] opens doors that [hurry|haste] [leaves shut|cannot open].", "[Good things|The best things] [take time|do not come at once|need time to grow]."],
    "kind": ["[Kindness|A kind word] [costs nothing and comes back|comes back|returns] [in the end|one day|sooner or later].", "[Those who help others|Those who share what they have] are never [alone|really alone|truly alone]."],
    "clever": ["[A good idea|A quiet thought] is [often|sometimes] [stronger than|better than|worth more than] [a strong arm|a loud voice].", "[Think first|Look twice], [then act|then leap|and then begin]."],
    "curious": ["[Every question|A good question] is [a door|the start of a road|a small lamp].", "Those who ask find [more|farther roads] than those who only look."],
    "honest": ["[The truth|An honest word] [is lighter to carry than|weighs less than] [a lie|any secret].", "[Honesty|Telling the truth] [makes|wins] [good friends|friends for life]."],
    "stubborn": ["[If at first|When] [it|a thing] does not work, [try again|try another way].", "[Not giving up|Going on] is [half of every|most of any] [success|journey]."],
    "shy": ["[Even a quiet voice|A small voice] can [be heard|say something great].", "[You do not have to be|Nobody has to be] loud to [matter|be a good friend]."],
    "generous": ["[What you give away|What is given gladly] [is never lost|stays with you].", "[Shared joy|Joy that is shared] [is double joy|grows]."],
    "careful": ["[Small care|A little care] [saves|spares] [big trouble|much trouble|a long repair].", "[Measure twice and cut once|Look where you step], [and all goes well|and you will get there]."],
}  # fmt: skip

# the wish, the thing, what it is for
WANTS: Final = [
    ("a {c} kite", "kite", "to fly it above the roofs"), ("a {c} boat", "boat", "to sail to the little island"),
    ("a {c} drum", "drum", "to play at the summer feast"), ("a {c} lantern", "lantern", "to light the dark path home"),
    ("a {c} scarf", "scarf", "to keep warm in the cold months"), ("a {c} bell", "bell", "to call everybody to supper"),
    ("a {c} feather", "feather", "to finish a splendid hat"), ("a {c} flower", "flower", "to give it to Grandmother"),
    ("a {c} stone", "stone", "to complete a collection"), ("a {c} book", "book", "to read it under the big tree"),
    ("a {c} ball", "ball", "to play with the neighbours"), ("a {c} cloak", "cloak", "to look like a king in a play"),
    ("a {c} button", "button", "to mend a coat"), ("a {c} bowl", "bowl", "to cook soup for the whole street"),
    ("a {c} wheel", "wheel", "to repair the old cart"), ("a {c} ribbon", "ribbon", "to wrap a birthday present"),
    ("a {c} map", "map", "to find the way to the sea"), ("a {c} flute", "flute", "to learn a song by heart"),
    ("a {c} pumpkin", "pumpkin", "to win a prize at the fair"), ("a {c} pillow", "pillow", "to sleep well at last"),
    ("a {c} basket", "basket", "to gather mushrooms in the woods"), ("a {c} sledge", "sledge", "to ride down the long hill"),
    ("a {c} clock", "clock", "to be on time for once"), ("a {c} rope", "rope", "to build a swing"),
]  # fmt: skip
WANT_COLOURS: Final = ["red", "blue", "green", "yellow", "white", "black", "brown", "purple", "golden", "silver"]

PLACES: Final = [
    "in a village by the sea", "at the edge of a deep forest", "in a house on a hill", "near a quiet lake", "in a small town with crooked streets",
    "on a farm with seven cows", "in a cottage beside a mill", "under the roots of an old oak", "in a valley between two mountains",
    "on a boat in the harbour", "behind a bakery", "in a garden full of roses", "beside a railway line", "on an island with one tree",
    "in a castle without a king", "at the end of a long road", "in a tower above the clouds", "near the market square", "in a warm barn",
    "by a bridge over a brook", "in a windmill", "in the last house before the moor", "next to a school", "in a cave with a round door",
]  # fmt: skip
THERE: Final = [
    "on the far side of the hill", "at the market in the next town", "in the cellar of the old inn", "at the top of the tallest tower",
    "beyond the dark wood", "in a shop across the river", "at the bottom of the valley", "in the attic of the mill", "behind the waterfall",
    "in the hut of the fisherman", "on the other shore of the lake", "under the stone bridge", "at the fair in the city", "in the house of the clockmaker",
    "on a shelf in the library", "in the hollow of a giant tree",
]  # fmt: skip
HELPERS: Final = [
    ("an old owl", "the owl"), ("a grey heron", "the heron"), ("a busy beaver", "the beaver"), ("a tired donkey driver", "the driver"),
    ("a tall stork", "the stork"), ("a wise raven", "the raven"), ("a young shepherd", "the shepherd"), ("a friendly miller", "the miller"),
    ("a travelling singer", "the singer"), ("a strong ox", "the ox"), ("a quick swallow", "the swallow"), ("a lonely giant", "the giant"),
    ("a cheerful postman", "the postman"), ("a very small beetle", "the beetle"), ("a blind carpenter", "the carpenter"), ("a clumsy goblin", "the goblin"),
]  # fmt: skip

# name: what is in the way, a first attempt that fails, a way out alone, a way out with help
OBSTACLES: Final = {
    "river": (
        ["But a [wide|deep|cold] river [lay across the path|blocked the way], and there was no [bridge|boat|ferry] [anywhere|in sight|to be seen].",
         "Then the path ended at a river that was [far too wide to jump|too deep to wade through|much too cold to swim]."],
        ["First {hero} tried to jump [across|over it], but {he} [landed in the mud|got wet up to the ears|fell short].", "{hero} put one foot into the water, [and|but] the current was too strong."],
        ["{hero} [found|gathered] [some|three|five] logs, tied them together with [grass|a belt|old rope], and [floated|paddled] across on the raft.",
         "So {hero} walked along the bank until the water was shallow, and [crossed|went over] from stone to stone."],
        ["Together they pushed a fallen tree over the water, and [it made|that was] a fine bridge.", "{The_helper} knew of a ford [upstream|behind the reeds], and led {hero} [across|through the water] by the hand."]),
    "wall": (
        ["But a high [stone|brick] wall stood [around the place|in the way], and [its|the] gate was [shut|locked].", "Soon {hero} came to a wall that was taller than [a house|three carts|any tree]."],
        ["{hero} tried to climb [it|up], but {he} slid down [every time|again and again].", "{hero} pushed against the gate with [both hands|all {his} strength], but it did not move."],
        ["Then {hero} [saw|noticed|spotted] a [small|narrow] hole near the ground, and [crept|squeezed] through it.", "At last {hero} piled up [some boxes|old barrels|flat stones] and climbed over."],
        ["{The_helper} bent down, and {hero} climbed onto {hhis} back and over the wall.", "{The_helper} had [a key|the right key|a bent nail], and a moment later the gate [swung open|stood open]."]),
    "dark": (
        ["But it grew so dark that {hero} could not see {his} own [feet|nose|hands].", "Then the sun went down, and the path [vanished|was gone] in the dark."],
        ["{hero} went on [for a while|a little], but {he} bumped into [a tree|a fence|a rock].", "{hero} called out, but only the echo [answered|called back]."],
        ["So {hero} waited until the moon came out, and [followed|walked by] its light.", "{hero} [looked up and found|found] the brightest star, and [followed|kept to] it all the way."],
        ["{The_helper} lit a [candle|lamp|torch], and [side by side|together] they [found|followed] the path again.", "{The_helper} knew every stone of the path, and {hero} held on to {hhim} and followed."]),
    "price": (
        ["But the {thing} cost ten coins, and {hero} had only [two|three|four].", "But the {thing} was not free, and {his} purse was [empty|as good as empty]."],
        ["{hero} offered [a button|two marbles|a song] for it, but the [seller|shopkeeper] [shook her head|only laughed].", "{hero} asked for a lower price, but the [seller|shopkeeper] [said no|would not hear of it]."],
        ["So {hero} swept the [shop|yard|steps] for [three days|a whole week], and earned the rest.", "{hero} baked [buns|biscuits|little cakes] and sold them [at the corner|in the street], until there were ten coins in the [jar|box]."],
        ["{The_helper} had [work to do|a roof to mend|wood to carry], and paid {hero} well for [helping|a day of help].", "{The_helper} lent {hero} the missing coins, and {hero} [paid back every one|gave them back within a month]."]),
    "storm": (
        ["But a storm [came up|broke loose], with [thunder and lightning|hail and wind|rain like a waterfall].", "Then the sky turned black, and a storm [shook|bent] the trees."],
        ["{hero} tried to run [on|faster], but the wind [pushed {him} back|threw {him} over].", "{hero} held up a big leaf, but the rain [went right through it|tore it away]."],
        ["{hero} [found|hid in] a dry [cave|shed|hollow tree], and waited until the [storm|thunder] had passed.", "So {hero} lay down flat behind a rock, counted to a hundred, and the storm [moved on|was over]."],
        ["{The_helper} [took|led] {hero} under a warm roof, and they told each other [stories|jokes|riddles] until the storm had passed.", "{The_helper} spread out [a cloak|a wing|a big sheet], and both stayed dry until the storm was over."]),
    "guard": (
        ["But a [grumpy|fierce|huge] guard stood at the [door|entrance] and let nobody in.", "\"[Nobody may pass|No one comes in here]!\" [shouted|growled] a guard at the [door|entrance]."],
        ["{hero} tried to slip past, but the guard [was quicker|saw everything].", "{hero} said please [three|ten] times, but the guard [only yawned|looked the other way]."],
        ["So {hero} asked the guard about [home|the weather|old times], and listened for an hour; then the guard smiled and [stepped aside|opened the door].",
         "{hero} shared {his} [bread|lunch|last apple] with the guard, and the guard [stepped aside|let {him} in]."],
        ["{The_helper} [was an old friend of the guard|had once done the guard a favour], and [one word was enough|so the door opened].", "{The_helper} sang a lullaby, the guard fell asleep, and {hero} [tiptoed|walked] in."]),
    "lost": (
        ["But the path split into [three|four|five], and no sign said which one to take.", "Soon every tree looked like the last one, and {hero} was lost."],
        ["{hero} took the [left|first|widest] path, but it led back to the [start|same place].", "{hero} walked and walked, but [an hour later|at noon] {he} stood at the same [stump|crossing]."],
        ["{hero} climbed a tall tree, looked around, and saw the right way at once.", "So {hero} laid out a trail of [pebbles|nuts|acorns], and tried one path after the other until one was right."],
        ["{The_helper} drew a map in the [sand|dust], and after that it was easy.", "{The_helper} [came this way|walked here] every week, and [showed|pointed out] the right path."]),
    "broken": (
        ["But when {he} got there, the {thing} was broken.", "But the {thing} had a [big|long|deep] crack [in it|down the side]."],
        ["{hero} tried to mend it with [spit and hope|wet leaves|a piece of string], but it fell apart [again|at once].", "{hero} pressed the parts together, but they [would not hold|came apart]."],
        ["So {hero} [borrowed|found] some [glue|tools], worked until [evening|midnight], and made it as good as new.", "{hero} took it apart, looked at every piece, and [slowly|little by little] put it together the right way."],
        ["{The_helper} held the pieces while {hero} [glued|tied|sewed] them, and soon it was whole again.", "{The_helper} knew how such things are made, and taught {hero} to mend it."]),
    "height": (
        ["But it hung [high up|far above], where {hero} could not reach it.", "But the {thing} was on the highest [branch|shelf|beam] of all."],
        ["{hero} jumped [and jumped|as high as {he} could], but {his} [fingers|paws|arms] only [touched|reached] the air.", "{hero} threw a [stick|shoe|cap] at it, and now the [stick|shoe|cap] was up there too."],
        ["{hero} built a ladder from [branches|old chairs|broom handles], and went up step by step.", "So {hero} tied a hook to a [string|rope], and with the [third|fifth|last] throw {he} pulled it down."],
        ["{hero} stood on the shoulders of {the_helper}, and that was just high enough.", "{The_helper} shook with all {hhis} might, and down it came, right into {his} arms."]),
    "rival": (
        ["But someone else wanted the {thing} too, and was already there.", "But a [proud|loud|rich] stranger [held|had taken] the {thing} and would not let go."],
        ["{hero} pulled and the stranger pulled, and [nothing good came of it|neither won].", "\"I saw it first!\" said {hero}, but the stranger only [laughed|turned away]."],
        ["So {hero} [proposed|suggested] to share it, a week for each, and the stranger [agreed|was glad|shook hands on it].", "{hero} asked the stranger why, listened, and found something that the stranger [liked even more|needed more]."],
        ["{The_helper} [made peace|settled it]: there was a second one [in the back|upstairs], and nobody had to go without.", "{The_helper} [held|set] a fair contest of riddles, and {hero} knew the last answer."]),
    "cold": (
        ["But it was so cold that {his} [breath froze|ears went numb|feet would not move].", "Then the frost came, and {hero} [shook|shivered] like a leaf."],
        ["{hero} rubbed {his} hands, but that [helped little|was not enough].", "{hero} tried to light a fire, but the wood was too [wet|green]."],
        ["{hero} stuffed {his} coat with dry [straw|leaves|hay], and was warm again.", "So {hero} [danced|hopped|ran] all the way, and [the cold could not catch {him}|that kept {him} warm]."],
        ["{The_helper} [shared|brought] hot soup and a [blanket|fur coat], and the cold was forgotten.", "{The_helper} made room by the fire, and they waited there until it was warmer."]),
    "fear": (
        ["But {he} heard a strange [growl|howl|scratching] from the bushes, and {his} heart beat [fast|like a drum].", "But something big [moved|rustled] in the shadows, and {hero} stood still with fear."],
        ["{hero} wanted to run away, but {his} [legs|knees] [would not move|were too weak].", "{hero} shut {his} eyes, but the noise [came closer|did not stop]."],
        ["Then {hero} took a deep breath, looked closely, and saw that it was only a [kitten|hedgehog|goat] [stuck|caught] in the thorns.", "\"Who is there?\" {hero} called in a firm voice, and out came nothing but a [small|sleepy] [duck|rabbit|puppy]."],
        ["{The_helper} [laughed|smiled] and said, \"[It is only|That is nothing but] the wind,\" and the fear went away.", "Side by side with {the_helper}, {hero} went nearer, and it was only an old sack in the wind."]),
}  # fmt: skip

OPENINGS: Final = [
    "[Once upon a time|Long ago|Once|Many years ago], there was {a_trait} {kind} [named|called] {hero}, who lived {place}.",
    "{hero} was {a_trait} {kind} who lived {place}.",
    "There [once lived|was once] {a_trait} {kind} {place}. {His} name was {hero}.",
    "[Do you know|Have you heard of] {hero}, the {trait} {kind}? {He} lived {place}.",
    "{place_cap} lived {a_kind} [by the name of|named] {hero}. {He} was [very|really|rather|always] {trait}.",
    "[This is the story of|Here is a story about] {hero}, {a_kind} who lived {place} and who was [very|always|truly] {trait}.",
]
HABITS: Final = [
    "Every [morning|evening|<day>] {he} [ate <food> and |][went for a walk|looked out of the window|fed the birds|swept the floor].",
    "{He} liked <food> [and|but not] <fruit>, and [sang|whistled|hummed] all day.",
    "Most of all {he} loved [the <season>|the smell of <food>|long walks|rainy days|stories].",
    "{hero} had [two|three|many] [friends|brothers|sisters] and [a <colour> hat|a round table|a <size> bed].",
    "[Everybody|All the neighbours|The whole place] [liked|knew] {hero}, because {he} [was never rude|always said good morning|shared {his} <fruit>].",
]
WANT_LINES: Final = [
    "{hero} wanted {want}, {reason}.",
    "[But|Yet] there was one thing that {he} [wished for|wanted more than anything]: {want}, {reason}.",
    '"I [wish I had|need|would love to have] {want}," {hero} [said|sighed|thought] <time>. "I want it {reason}."',
    "<Time>, {hero} had a [thought|dream|plan]: {he} needed {want}, {reason}.",
    "For [a year|weeks|as long as {he} could remember], {hero} had dreamed of {want}, {reason}.",
    '"What do you wish for?" {his} [mother|father|grandmother|uncle] asked. "{want_cap}," said {hero}, "{reason}."',
]
WANT_FIRST: Final = [
    "{hero} wanted {want}, {reason}.",
    '"I [wish I had|need|would love to have] {want}," {hero} [said|sighed|thought] <time>. "I want it {reason}."',
    "What {hero} [wished for|wanted more than anything] was {want}, {reason}.",
    '"{want_cap}!" {hero} [said|cried|whispered] <time>. "[That is what I need|I must have one], {reason}."',
]
SETTING_OUT: Final = [
    "<Time>, when <weather>, {he} [set out|left home|started] to find one {there}.",
    "People said that there was one {there}, so {hero} [packed|took] some <food> and <walk> off.",
    "{hero} heard of one {there}. [It was a long way|It was not near], but {he} <walk> [on|along] <soft>.",
    "So {he} [tied {his} shoes|put on a coat|took a stick] and <walk> [out of the door|away]; the {thing} had to be {there}.",
    '"You will find one {there}," [an old woman|a passing sailor|the baker] had told {him}. <Time> {hero} <walk> there[, although <weather>|].',
]
FEELINGS: Final = [
    "{hero} felt <sad>.", "{He} sat down [on a stone|in the grass|by the way] and [felt|was] <sad>.", "\"Oh no,\" [said|cried|whispered] {hero}. \"[What now|What shall I do]?\"",
    "[For a moment|For a while], {he} did not know what to do.", "{hero} wanted to cry, but {he} [did not|bit {his} lip].", "\"[I will not give up|There must be a way],\" {he} [said|thought].",
]  # fmt: skip
MEETINGS: Final = [
    "[Just then|At that moment|A little later], {a_helper} came [by|along|down the path].",
    "Then {hero} met {a_helper}, who [was resting|was eating <fruit>|sat] [nearby|in the shade].",
    "Luckily, {a_helper} had seen it all.",
    '"[Hello|Good day|Why so sad]?" said a voice. It was {a_helper}.',
]
TALKS: Final = [
    '"[Can|May] I help you?" asked {the_helper}. "[Yes, please|I would be glad]!" said {hero}.',
    '"[Please help me|I need help]," said {hero}. "[Of course|Gladly|Why not]," {the_helper} [answered|said|replied], and {hhe} smiled.',
    "{hero} told {hhim} everything, and {the_helper} [listened|nodded] <soft>.",
    '"[Two are stronger than one|We will find a way|Do not worry]," said {the_helper}.',
    '{The_helper} [thought|looked around] for a while. "I [have|may have] an idea," {hhe} said.',
]
ARRIVALS: Final = [
    "And there it was: {want}!", "Soon {hero} held the {thing} in {his} [hands|arms].", "So {he} got the {thing} [after all|at last|in the end].",
    "[A little later|Before long|That same day], {hero} had what {he} wanted: {want}.", "{He} looked at the {thing} and [laughed|cheered|clapped] <loud>.",
]  # fmt: skip
THANKS: Final = [
    '"[Thank you|Many thanks], [dear|my] friend," {hero} said to {the_helper}.',
    "{hero} thanked {the_helper} and gave {hhim} some <fruit>.",
    "{hero} and {the_helper} [became friends|stayed friends for ever|shared a pot of <food>].",
    '"I could not have done it [alone|without you]," said {hero}, and {the_helper} [smiled|laughed] <loud>.',
]
ENDINGS: Final = [
    "{hero} went home and was <glad>.", "That night, {hero} slept [well|deeply|like a stone], and {he} was <glad>.", "And [from that day on|ever after], {hero} [kept|took good care of] the {thing}.",
    "When {he} [got|came] home, everybody [cheered|wanted to see the {thing}|was waiting with <food>].", "And so {hero} could do what {he} had wished for, {reason}.",
    "{He} has the {thing} [to this day|still], {place}.", "\"[What a day|That was quite a day]!\" said {hero}, and {he} was <glad>.",
]  # fmt: skip
CLOSINGS: Final = ["The end.", "And that is [the whole|all of the] story.", "That is how it was."]
SECOND: Final = [
    "But that was not all.",
    "The way was not over yet.",
    "[Hardly|Only] an hour later there was more trouble.",
    "But the day had one more surprise.",
]
