"""The vocabulary of the tiny BERT: whole words of the sample, frequent English ones, and pieces for any other text."""

import string

from common.data import sample_data

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]

# ASCII, Latin letters with accents, and what typesetters use. A word with any other character is [UNK].
CHARACTERS = [character for character in string.printable if not character.isspace()]
CHARACTERS += [chr(code) for code in range(0xC0, 0x180)]
CHARACTERS += "‘’“”–—…€£¥§©®°·«»¡¿½"

FREQUENT_WORDS = """
the of and to in is was for that on as with by at from it he his be are has had have not they which an this were been
or but their its who will would said after also more one two three first last new other all some many most about when
where there than then into over out up down under between during before since until while against because if so no only
can could may might must should do does did say says make made take took go went come came get got give gave see saw
know known think thought find use used work works call called show shown hold held win lead led report reported become
year years day days week weeks month months time times today hour hours night morning January February March April May
June July August September October November December Monday Tuesday Wednesday Thursday Friday Saturday Sunday
people man men woman women child children family friend name life death home house water food world country state states
city town place area part number group company government president minister party law court police war army market
money million billion percent price business bank industry school university student research study health hospital
disease drug patient film book music game team player match club election vote member leader head office power energy
oil nuclear trade union public national international political economic social local American British French German
European Chinese Japanese Russian United States Europe America Britain France Germany China Japan Russia Africa Asia
London York Washington North South East West Mr Mrs Dr US UK EU The In He It She They We But And A An On At For This
old young long short high low large small big good bad best great early late next same different own such very well
"""

# Frequent sequences of letters, for words that are not in the vocabulary: at their start and further in.
FREQUENT_PIECES = """
th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou io le ve co me de hi ri ro ic ne ea
ra ce li ch ll be ma si om ur ca el ta la ns di fo ho pe ec pr no ct us ac ot il tr ly nc et ut ss so rs un lo wa ge ie
wh ee wi em ad ol rt po we na ul ni ts mo ow pa im mi ai sh ir su id os iv ia am fi ci vi pl ig tu ev ld ry mp fe bl ab
ing ion ent and tio ter ati for ers ate ver all ith con com per res ment est ive tion sion able ness ance ence ity ous
pro pre dis int inter over under out sub trans ation ally ical ists ism ship ward less ful age ant ist ize ise
"""


def bert_pieces() -> list[str]:
    """Return every piece once; its index is its number. A piece that starts with ## continues a word."""
    sample_words = [*sample_data.NAMES, "Maybe", "maybe", "has", "today", *sample_data.VERBS, *sample_data.OBJECTS]
    words, pieces = FREQUENT_WORDS.split(), FREQUENT_PIECES.split()
    inside = [f"##{piece}" for piece in [*CHARACTERS, *pieces]]
    return list(dict.fromkeys([*SPECIAL, *CHARACTERS, *sample_words, *words, *pieces, *inside]))
