"""Names and sentences of the needle task. tests/needle/haystack.c has the same list and rule.

A name is three syllables; those whose weighted sum of indices is a multiple of 8 are held out: no
training batch contains one, every evaluation uses only them.
"""
SYLLABLES = (
    "ba bel bor cai dan del dor fal fen gar gil har hel ith jor kal kel kor lan lis lor mar mel mir "
    "nal nes nor oli pas pel qui ran rel ros sal sel tam ter tor ula van vel vir wen xan yor zan zel"
).split()
COUNT = len(SYLLABLES)
DIGITS = 6


def held_out(a, b, c):
    return (7 * a + 3 * b + 5 * c) % 8 == 0


def name(a, b, c):
    return (SYLLABLES[a] + SYLLABLES[b] + SYLLABLES[c]).capitalize()


def fact(who, code):
    return f"The passcode for {who} is {code}."


def question(who):
    return f"What is the passcode for {who}? Answer:"
