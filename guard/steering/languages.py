"""Which language a text is in, as far as its function words tell. Owns the lists.

Small on purpose: it measures which of a few languages an answer is in, and explains itself. Words that two of the
languages share are in no list.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_LISTS = {
    "en": "the and of is are was were with that this it for you your they from which can will would not have has been "
    "there what when how their its to be by as or if we he she his her about more",
    "fr": "le les des est et une dans que qui pour pas vous nous avec sur sont ce cette ces elle ils elles au aux du "
    "mais ou où votre notre leur leurs être avoir peut peuvent comme plus très c'est l'on j'ai je tu qu'il d'un d'une",
    "es": "el los las y del por para se su sus lo como más pero muy está son fue ser puede pueden este esta "
    "estos estas hay también cuando donde usted nosotros ella ellos yo qué cómo",
    "de": "der die das und ist nicht ein eine einen einem mit von zu auf für sich dem den sie wir ihr auch wird werden "
    "sind oder aber wie wenn kann können haben hat bei nach aus",
    "it": "gli della delle dei di che è sono non per nel nella più anche questo questa questi come ma loro "
    "suo sua può possono essere quando dove lei noi voi alla dal",
}
FUNCTION_WORDS: Mapping[str, frozenset[str]] = {
    language: frozenset(words.split()) for language, words in _LISTS.items()
}
LEAST_WORDS = 3
"""Function words of any of the languages that a text must have for a share to mean something."""

_WORD = re.compile(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)*")


def language_share(text: str, language: str) -> float:
    """Of the function words in ``text`` the share that are this language's, 0 to 1; 0 where there are too few."""
    words = [word.replace("\u2019", "'") for word in _WORD.findall(text.lower())]
    found = {name: sum(word in known for word in words) for name, known in FUNCTION_WORDS.items()}
    total = sum(found.values())
    return found[language] / total if total >= LEAST_WORDS else 0.0
