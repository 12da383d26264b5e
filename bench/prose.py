"""A book in no language: HTML that compresses like an English novel, made here, the same every time.

What a compressor finds in a novel is word frequencies that fall as Zipf found, words that follow each other more
often than chance would have it, turns of phrase that come back after many pages, and little markup. Each is made
here with a weight of its own; the weights were chosen so that gzip and zstd come to the ratios that were published
for a novel of four megabytes.
"""

import itertools
from bisect import bisect
from collections.abc import Iterator
from random import Random

# Its random() is the same in every version of Python; nothing else of it is used.
_SEED = 1869

_WORDS = """
the and to of a he in that his was with it had her not at on him as but for you she is said be all from were
by which they so who what one have this up me there them would are or when into out been then about my an their
if no do could now your we some has only more did down how over see after come know before like time very again
went still than will can hand looked where too such off these us own any back eyes first must through same here
face long little just man men old good saw began well other young two himself nothing away every thought left
"""
_NAMES = "Arlen Besko Corvin Dunya Elmar Fenna Galt Hesper Ilya Jorun Katrin Lowell Mirov Nadine Orlan Petra"
# What a syllable begins with, goes on with and ends with, and a word behind its last; - is nothing.
_ONSETS = "b br c ch cl cr d dr f fl fr g gr h j l m n p pl pr qu r s sc sh sp st str t th tr v w wh -"
_VOWELS = "a a a e e e e i i o o u ai ea ee ou io"
_CODAS = "b ck d ff g l ll m n n nd ng nt p r r rd s s ss st t t th x - - - -"
_ENDINGS = "- - - - - s s ed ed ing ly er ness ion ment 's"

_VOCABULARY = 12_000
_ZIPF = 1.252
_FLATTEN = 2.0
# How often a word follows one of those that like to follow the one before, and how many these are.
_HABIT = 0.75
_FOLLOWERS = 71
# How often a turn of phrase is said once more, and how many there are.
_AGAIN = 0.07
_PHRASES = 17_000
_LINE = 72


def write_book(size: int = 4_039_229, seed: int = _SEED) -> bytes:
    """A novel as one page of exactly so many bytes, in ASCII."""
    head = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>A book</title>\n<style>\n'
        "p { margin: 0; text-indent: 1em }\nh2 { page-break-before: always; text-align: center }\n</style>\n"
        "</head>\n<body>\n"
    )
    tail = "</body>\n</html>\n"
    parts, left = [head], size - len(head) - len(tail)
    for paragraph in _write_paragraphs(Random(seed)):
        if len(paragraph) > left:
            break
        parts.append(paragraph)
        left -= len(paragraph)
    return "".join([*parts, " " * left, tail]).encode("ascii")


class _Dice:
    """Numbers from 0 up, the low ones more often: the weight of the one at rank r is 1 / (r + flatten) ** zipf."""

    def __init__(self, count: int, zipf: float, flatten: float) -> None:
        self._bounds = list(itertools.accumulate(1 / (rank + flatten) ** zipf for rank in range(count)))

    def throw(self, random: Random) -> int:
        return min(bisect(self._bounds, random.random() * self._bounds[-1]), len(self._bounds) - 1)


def _choose(random: Random, among: str) -> str:
    each = among.split()
    return each[int(random.random() * len(each))].strip("-")


def _make_vocabulary(random: Random) -> list[str]:
    words = _WORDS.split()
    known = set(words)
    while len(words) < _VOCABULARY:
        if random.random() < 0.02:
            word = _choose(random, _NAMES) if random.random() < 0.1 else _make_word(random).capitalize()
        else:
            word = _make_word(random)
        if word not in known and len(word) > 2:
            known.add(word)
            words.append(word)
    return words


def _make_word(random: Random) -> str:
    # Rare words are longer ones, a little.
    syllables = 1 + (random.random() < 0.6) + (random.random() < 0.25)
    sounds = [_choose(random, _ONSETS) + _choose(random, _VOWELS) for _ in range(syllables)]
    return "".join(sounds) + _choose(random, _CODAS) + _choose(random, _ENDINGS)


def _write_words(random: Random) -> Iterator[str]:
    """Words without end."""
    words = _make_vocabulary(random)
    unigrams = _Dice(len(words), _ZIPF, _FLATTEN)
    followers: dict[str, list[str]] = {}
    habit = _Dice(_FOLLOWERS, 0.9, 1.0)
    phrases: list[list[str]] = []
    favourite = _Dice(_PHRASES, 0.4, 4.0)
    word = words[0]
    recent: list[str] = []
    while True:
        if phrases and random.random() < _AGAIN:
            # Also the words of a phrase that is said again go into the next one.
            said = phrases[favourite.throw(random) % len(phrases)]
        else:
            if random.random() < _HABIT:
                if word not in followers:
                    followers[word] = [words[unigrams.throw(random)] for _ in range(_FOLLOWERS)]
                said = [followers[word][habit.throw(random)]]
            else:
                said = [words[unigrams.throw(random)]]
        for word in said:
            recent.append(word)
            yield word
        if len(recent) >= 8:
            length = 2 + int(random.random() * 5)
            phrase = recent[:length]
            recent = []
            if len(phrases) < _PHRASES:
                phrases.append(phrase)
            else:
                phrases[int(random.random() * _PHRASES)] = phrase


def _write_sentences(random: Random) -> Iterator[str]:
    words = _write_words(random)
    while True:
        length = 3 + int(random.random() * 12) + int(random.random() * 12)
        sentence = list(itertools.islice(words, length))
        for place in range(2, length - 1):
            if random.random() < 0.1:
                sentence[place] += "," if random.random() < 0.93 else ";"
        sentence[0] = sentence[0][:1].upper() + sentence[0][1:]
        end = random.random()
        text = " ".join(sentence) + ("." if end < 0.85 else "?" if end < 0.93 else "!")
        yield f"&ldquo;{text}&rdquo;" if random.random() < 0.25 else text


def _write_paragraphs(random: Random) -> Iterator[str]:
    sentences = _write_sentences(random)
    for chapter in itertools.count(1):
        yield f'<h2 id="chapter-{chapter}">Chapter {chapter}</h2>\n'
        for _ in range(20 + int(random.random() * 40)):
            text = " ".join(itertools.islice(sentences, 1 + int(random.random() * 7)))
            yield f"<p>\n{_wrap(text)}\n</p>\n"


def _wrap(text: str) -> str:
    lines, line = [], ""
    for word in text.split(" "):
        if len(line) + len(word) >= _LINE:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    return "\n".join([*lines, line])
